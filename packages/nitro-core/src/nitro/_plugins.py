"""Finds the installed plugins, loads each on its own, and reports those that fail."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType

import pluggy

from .errors import BackendError, NitroError, did_you_mean
from .hooks import ENTRY_POINT_GROUP, BackendInfo, ExportBackend, NitroSpec

OFFICIAL_EXTRAS = ("stablehlo", "tf")
"""The extras of nitro-core that bring a backend of the same name."""


@dataclass(frozen=True, kw_only=True)
class InstalledBackend:
    """A backend that a plugin offers.

    Attributes:
        info: The record that the plugin returned.
        plugin: The name of the plugin's entry point.
        distribution: Name and version of the package that holds the plugin.
    """

    info: BackendInfo
    plugin: str
    distribution: str


@dataclass(frozen=True, kw_only=True)
class PluginFailure:
    """A plugin that cannot be used, or a name that two plugins claim.

    Attributes:
        name: What a user would ask for: the backend, or else the plugin's entry point,
            which by convention has the name of the backend that it brings.
        distributions: Name and version of each package involved.
        error: What to raise when `name` is asked for; its cause is the plugin's own
            exception, where there is one.
    """

    name: str
    distributions: tuple[str, ...]
    error: BackendError


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What the installed plugins bring.

    Attributes:
        backends: The usable backends by name, sorted.
        failures: What cannot be used, sorted by name.
    """

    backends: Mapping[str, InstalledBackend]
    failures: tuple[PluginFailure, ...]


@functools.cache
def discover() -> Discovery:
    """Loads every plugin of the entry-point group `nitro`, once per process.

    Plugins are light by contract, so this imports no backend's library. A plugin that
    fails, in whatever way, becomes a record in `failures` and disturbs no other.
    `discover.cache_clear()` makes the next call look again.
    """
    found: list[InstalledBackend] = []
    failures: list[PluginFailure] = []
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        distribution = _distribution_label(entry_point)
        try:
            infos = _load_plugin(entry_point, distribution)
        except BackendError as error:
            failures.append(
                PluginFailure(name=entry_point.name, distributions=(distribution,), error=error)
            )
        else:
            found += [
                InstalledBackend(info=info, plugin=entry_point.name, distribution=distribution)
                for info in infos
            ]
    backends, conflicts = _by_name(found)
    return Discovery(
        backends=MappingProxyType(backends),
        failures=tuple(sorted(failures + conflicts, key=lambda f: (f.name, f.distributions))),
    )


def get_backend(name: str) -> ExportBackend:
    """Loads the export backend of this name; imports the libraries that it needs.

    Plugins that were installed since the last look are found too, so that a notebook
    need not restart after the `pip install` that the error asks for.

    Raises:
        BackendError: No such backend, or its plugin or library cannot be loaded; the
            message lists what is installed, or names the package and the cause.
    """
    if name not in discover().backends:
        importlib.invalidate_caches()
        discover.cache_clear()
    discovery = discover()
    if name not in discovery.backends:
        raise _unavailable(name, discovery)
    return _load_backend(discovery.backends[name])


def backend_of(path: Path) -> ExportBackend | None:
    """The backend that recognises a path as one of its artifacts; None if there is none.

    Raises:
        BackendError: The library of that backend cannot be loaded.
    """
    if not path.is_dir():
        return None
    for name, found in discover().backends.items():
        if found.info.recognises is not None and found.info.recognises(path):
            return get_backend(name)
    return None


def install_hint(extra: str) -> str:
    """The command that brings an official backend along, quoted for every shell."""
    return f'pip install "nitro-core[{extra}]"'


def _load_plugin(entry_point: EntryPoint, distribution: str) -> list[BackendInfo]:
    """Imports, registers and asks one plugin; raises BackendError for all that is wrong."""
    plugin = f"Plugin `{entry_point.name}` of {distribution}"
    try:
        module = entry_point.load()
    # Importing a plugin runs code that we do not know, `sys.exit` included.
    except (Exception, SystemExit) as error:
        raise BackendError(
            f"{plugin} cannot be imported: {_summary(error)}",
            fix=f"update or reinstall {distribution}, or uninstall it",
        ) from error

    # A manager of its own: what is wrong with one plugin is never put down to another.
    manager = pluggy.PluginManager("nitro")
    manager.add_hookspecs(NitroSpec)
    try:
        manager.register(module, name=entry_point.name)
    except pluggy.PluginValidationError as error:
        raise BackendError(
            f"{plugin} implements a hook with a signature that this version of Nitro does "
            f"not have: {_summary(error)}",
            expected="the arguments of `nitro.hooks.NitroSpec`, or fewer",
            fix=f"update {distribution} to a version made for this Nitro",
        ) from error
    _refuse_unknown_hooks(manager, module, plugin)

    try:
        infos = [info for result in manager.hook.nitro_export_backends() for info in result]
    # The hook is the plugin's code.
    except Exception as error:
        raise BackendError(
            f"{plugin} failed to list its backends: {_summary(error)}",
            expected="an iterable of `nitro.hooks.BackendInfo`",
            fix=f"update or reinstall {distribution}, or uninstall it",
        ) from error
    return [_checked_info(info, plugin) for info in infos]


def _refuse_unknown_hooks(manager: pluggy.PluginManager, module: object, plugin: str) -> None:
    callers = manager.get_hookcallers(module) or []
    valid = [name for name in vars(NitroSpec) if name.startswith("nitro_")]
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = next(caller.name for caller in callers if not caller.has_spec())
        raise BackendError(
            f"{plugin} implements a hook that Nitro does not have: `{unknown}`.",
            expected=did_you_mean(unknown, valid),
            fix="rename the function in the plugin, or update the plugin",
        ) from error
    if not callers:
        unmarked = [name for name in valid if hasattr(module, name)]
        raise BackendError(
            f"{plugin} implements no hook of Nitro.",
            expected=did_you_mean("", valid),
            fix=f"mark `{unmarked[0]}` with `@nitro.hooks.hookimpl`"
            if unmarked
            else "point the entry point at the module that holds the hooks",
        )


def _checked_info(info: object, plugin: str) -> BackendInfo:
    if not isinstance(info, BackendInfo):
        raise BackendError(
            f"{plugin} returned {info!r} from `nitro_export_backends`.",
            expected="an iterable of `nitro.hooks.BackendInfo`",
        )
    return info


def _by_name(
    found: Iterable[InstalledBackend],
) -> tuple[dict[str, InstalledBackend], list[PluginFailure]]:
    """Sorts backends by name; a name that is claimed twice belongs to nobody."""
    claims: dict[str, list[InstalledBackend]] = {}
    for backend in found:
        claims.setdefault(backend.info.name, []).append(backend)
    backends = {name: owners[0] for name, owners in sorted(claims.items()) if len(owners) == 1}
    conflicts = [_conflict(name, owners) for name, owners in claims.items() if len(owners) > 1]
    return backends, conflicts


def _conflict(name: str, owners: list[InstalledBackend]) -> PluginFailure:
    distributions = tuple(sorted({owner.distribution for owner in owners}))
    return PluginFailure(
        name=name,
        distributions=distributions,
        error=BackendError(
            f"The export backend `{name}` is offered {len(owners)} times: by "
            f"{' and by '.join(distributions)}.",
            expected="one package for each name",
            fix="uninstall all but one of them",
        ),
    )


def _unavailable(name: str, discovery: Discovery) -> BackendError:
    for failure in discovery.failures:
        if failure.name == name:
            # A new instance, or tracebacks would pile up on the recorded one.
            error = BackendError(
                failure.error.problem, expected=failure.error.expected, fix=failure.error.fix
            )
            error.__cause__ = failure.error.__cause__
            return error
    broken = ", ".join(f"`{f.name}` ({', '.join(f.distributions)})" for f in discovery.failures)
    return BackendError(
        f"There is no export backend `{name}`."
        + (f" These plugins failed to load: {broken}." if broken else ""),
        expected=did_you_mean(name, discovery.backends),
        fix=install_hint(name)
        if name in OFFICIAL_EXTRAS
        else "see `nitro backends` for what is installed",
    )


def _load_backend(installed: InstalledBackend) -> ExportBackend:
    name, distribution = installed.info.name, installed.distribution
    try:
        backend = installed.info.load()
    except NitroError:
        raise
    # Loading runs the backend's code and imports its libraries.
    except Exception as error:
        raise BackendError(
            f"The export backend `{name}` of {distribution} cannot be loaded: {_summary(error)}",
            fix=install_hint(name)
            if name in OFFICIAL_EXTRAS
            else f"reinstall {distribution} with all that it needs",
        ) from error
    if not isinstance(backend, ExportBackend) or backend.name != name:  # pyright: ignore[reportUnnecessaryIsInstance] - plugins return anything
        raise BackendError(
            f"The export backend `{name}` of {distribution} loads as {backend!r}.",
            expected=f"an object with `write`, `load` and the name {name!r} "
            "(`nitro.hooks.ExportBackend`)",
            fix="run `nitro.testing.check_backend` in the plugin's tests",
        )
    return backend


def _distribution_label(entry_point: EntryPoint) -> str:
    distribution = entry_point.dist
    if distribution is None:
        return f"the package of `{entry_point.value}`"
    return f"{distribution.name} {distribution.version}"


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
