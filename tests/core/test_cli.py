from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from nitro import __version__, _cli
from nitro._cli import _backends
from nitro._plugins import Discovery, InstalledBackend, PluginFailure
from nitro.errors import BackendError, ConfigError
from nitro.hooks import BackendInfo


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `nitro` and returns its exit code, stdout and stderr."""

    def invoke(*words: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as exit_:
            _cli.main(words)
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return invoke


def _raise(error: Exception) -> Any:
    def discover() -> Discovery:
        raise error

    return discover


def test_version_is_printed(run: Any) -> None:
    assert run("--version") == (0, f"nitro {__version__}\n", "")


def test_help_lists_the_commands(run: Any) -> None:
    code, out, _ = run("--help")

    assert code == 0
    assert "backends" in out


@pytest.mark.parametrize("words", [["bogus"], ["backends", "--bogus"]])
def test_usage_error_exits_with_2(run: Any, words: list[str]) -> None:
    code, out, err = run(*words)

    assert (code, out) == (2, "")
    assert "bogus" in err


def test_error_is_one_message_on_stderr(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError("`width` is -1.", expected="a positive integer", fix="--set width=1")
    monkeypatch.setattr(_backends, "discover", _raise(error))

    assert run("backends") == (
        1,
        "",
        "error: `width` is -1.\n  expected: a positive integer\n  fix: --set width=1\n",
    )


def test_unforeseen_error_says_how_to_see_more(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backends, "discover", _raise(KeyError("x")))

    code, out, err = run("backends")

    assert (code, out) == (1, "")
    assert err == "error: KeyError: 'x'\n  fix: `nitro --debug ...` shows where\n"


@pytest.mark.parametrize("words", [["--debug", "backends"], ["backends", "--debug"]])
def test_debug_shows_the_traceback(
    run: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(_backends, "discover", _raise(ConfigError("`width` is -1.")))

    code, _, err = run(*words)

    assert code == 1
    assert err.startswith("Traceback (most recent call last):")
    assert "ConfigError: `width` is -1." in err


def test_debug_after_a_double_dash_is_an_argument(run: Any) -> None:
    code, _, err = run("backends", "--", "--debug")

    assert code == 2
    assert "--debug" in err


def test_backends_lists_what_works_and_what_failed(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = BackendInfo(name="toy", summary="A toy.", load=lambda: pytest.fail("loaded"))
    failure = PluginFailure(
        name="bad",
        distributions=("nitro-bad 1.0",),
        error=BackendError("Plugin `bad` of nitro-bad 1.0 cannot be imported.", fix="update it"),
    )
    toy = InstalledBackend(info=info, plugin="toy", distribution="nitro-toy 2.1")
    found = Discovery(backends=MappingProxyType({"toy": toy}), failures=(failure,))
    monkeypatch.setattr(_backends, "discover", lambda: found)

    code, out, _ = run("backends")

    assert code == 0
    assert out.splitlines() == [
        "toy  A toy.  nitro-toy 2.1",
        "",
        "`bad` cannot be used:",
        "  Plugin `bad` of nitro-bad 1.0 cannot be imported.",
        "    fix: update it",
    ]


def test_backends_says_how_to_install_one(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Discovery(backends=MappingProxyType({}), failures=())
    monkeypatch.setattr(_backends, "discover", lambda: nothing)

    code, out, _ = run("backends")

    assert code == 0
    assert out == 'No export backend is installed.\n  fix: pip install "nitro-core[stablehlo]"\n'


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ("pass `overwrite=True`, or another `name`", "pass `--overwrite`, or another `name`"),
        ('`Nitro(..., resume="auto")` goes on', "`--resume` goes on"),
        ("pass a `max_epochs` above 3", "pass a `--max-epochs` above 3"),
        ("use `batch_sizes=(1, 32)`", "use `--batch-sizes 1,32`"),
        ('`resume="r#12ab"` or `early_stop=None`', '`resume="r#12ab"` or `early_stop=None`'),
        ("pass another `run_dir=`", "pass another `--run-dir`"),
    ],
)
def test_fix_names_flags(run: Any, monkeypatch: pytest.MonkeyPatch, fix: str, said: str) -> None:
    monkeypatch.setattr(_backends, "discover", _raise(ConfigError("`overwrite=True`", fix=fix)))

    assert run("backends")[2] == f"error: `overwrite=True`\n  fix: {said}\n"
