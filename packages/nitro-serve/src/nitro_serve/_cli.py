"""The `nitro-serve` command: arguments in, exit code out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nitro.errors import ConfigError, NitroError

app = typer.Typer(
    name="nitro-serve",
    help="Serves bundles over the Open Inference Protocol (KServe v2).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Host = Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")]


@app.callback()
def _options(
    *,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Serves bundles over the Open Inference Protocol (KServe v2)."""


@app.command()
def repository(
    artifacts: Annotated[
        list[Path], typer.Argument(metavar="BUNDLE...", help="Bundles, or `.onnx` files.")
    ],
    to: Annotated[Path, typer.Option("--to", help="The model repository; made if absent.")],
    *,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Most rows of a call. Default: the largest compiled size.")
    ] = None,
    queue_delay_us: Annotated[
        int, typer.Option(help="How long a request may wait for others, in microseconds.")
    ] = 0,
    instances: Annotated[int, typer.Option(help="Copies of a model that run at once.")] = 1,
    gpu: Annotated[bool, typer.Option("--gpu", help="Run them on GPUs.")] = False,
    postprocess: Annotated[
        bool, typer.Option("--postprocess", help="Run the bundle's post-processing code, too.")
    ] = False,
    labels: Annotated[
        list[str] | None,
        typer.Option(metavar="OUTPUT=FILE", help="Class names of an output, one a line."),
    ] = None,
    all_versions: Annotated[
        bool, typer.Option("--all-versions", help="Serve all versions, not only the newest.")
    ] = False,
) -> None:
    """Adds bundles to a Triton model repository, each as its model's next version."""
    from ._repository import add_bundle, add_onnx

    kind = "gpu" if gpu else "cpu"
    for artifact in artifacts:
        if artifact.suffix == ".onnx":
            version = add_onnx(
                artifact,
                to,
                max_batch_size=32 if max_batch_size is None else max_batch_size,
                queue_delay_us=queue_delay_us,
                instances=instances,
                kind=kind,
            )
        else:
            version = add_bundle(
                artifact,
                to,
                max_batch_size=max_batch_size,
                queue_delay_us=queue_delay_us,
                instances=instances,
                kind=kind,
                postprocess=postprocess,
                labels=_pairs(labels),
                serves_all_versions=all_versions,
            )
        print(version)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The model repository.")],
    *,
    host: Host = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="REST.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Prometheus metrics.")] = 8002,
    control: Annotated[
        bool, typer.Option("--control", help="Let clients load and unload models.")
    ] = False,
    poll: Annotated[
        int | None, typer.Option(metavar="SECONDS", help="Look for new versions so often.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command, and start nothing.")
    ] = False,
) -> None:
    """Starts Triton on a model repository. Further arguments are Triton's own."""
    from ._triton import plan_launch

    launch = plan_launch(
        directory,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        control=control,
        poll_s=poll,
        extra=context.args,
    )
    if dry_run:
        print(launch)
    else:
        launch.run()


@app.command()
def local(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Bundles, or a Triton model repository.")
    ],
    *,
    host: Host = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="REST, and metrics at /metrics.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC.")] = 8001,
    batching: Annotated[bool, typer.Option(help="Join requests that wait.")] = True,
    postprocess: Annotated[
        bool, typer.Option("--postprocess", help="Run the bundles' post-processing code, too.")
    ] = False,
    untrusted: Annotated[
        bool, typer.Option("--untrusted", help="Try programs in a child process before loading.")
    ] = False,
    max_body_bytes: Annotated[int, typer.Option(help="Most bytes of a request.")] = 64 * 2**20,
    max_rows: Annotated[int, typer.Option(help="Most rows of a request.")] = 4096,
    max_waiting: Annotated[int, typer.Option(help="Most requests waiting for a model.")] = 1024,
    timeout_s: Annotated[float, typer.Option(help="How long a request may take.")] = 60.0,
    control: Annotated[
        bool, typer.Option("--control", help="Let clients load and unload models.")
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option(help="The token that --control asks clients for.")
    ] = None,
    poll: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Look for changed bundles so often.")
    ] = None,
    access_log: Annotated[
        str | None, typer.Option(metavar="FILE", help="A JSON line a request; - for stdout.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
) -> None:
    """Serves the bundles of a folder on this machine, REST and gRPC."""
    from ._local import run_local

    run_local(
        directory,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        batching=batching,
        postprocess=postprocess,
        untrusted=untrusted,
        max_body_bytes=max_body_bytes,
        max_rows=max_rows,
        max_waiting=max_waiting,
        timeout_s=timeout_s,
        control=control,
        token_file=token_file,
        poll_s=poll,
        access_log=access_log,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )


def _pairs(texts: list[str] | None) -> dict[str, Path]:
    pairs = dict[str, Path]()
    for text in texts or ():
        output, equals, file = text.partition("=")
        if not equals or not Path(file).is_file():
            raise ConfigError(
                f"`--labels {text}` names no file." if equals else f"`--labels {text}` has no `=`.",
                expected="an output and a text file: --labels logits=classes.txt",
            )
        pairs[output] = Path(file)
    return pairs


def main() -> None:
    """Runs the command line; every error is one message and a non-zero exit code."""
    debug = "--debug" in sys.argv[1:]
    try:
        # Typer knows options of the whole command only in front of the sub-command.
        app(args=[argument for argument in sys.argv[1:] if argument != "--debug"])
    except NitroError as error:
        if debug:
            raise
        sys.exit(f"error: {error}")
    except OSError as error:
        if debug:
            raise
        told = f"`{error.filename}`: {error.strerror}" if error.filename else str(error)
        sys.exit(f"error: {told}.\n  expected: a place that can be read or written")
