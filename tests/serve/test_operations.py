"""How `nitro-serve local` is run: limits, reloads, signals, tokens, and bundles that are broken."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from nitro.export import ExportSpec
from nitro_export_stablehlo import load_bundle

pytest.importorskip("tritonclient.grpc", reason="needs tritonclient: uv sync --group serve")
import aiohttp
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException


def _body(rows: int = 1, **more) -> bytes:
    pixels = np.arange(rows * 16).reshape(rows, 16) % 251
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [rows, 16]}
    return json.dumps({"inputs": [{**tensor, "data": pixels.tolist()}], **more}).encode()


def _post(server, path: str, body: bytes = b"{}", **headers: str):
    """The status and the JSON of an answer."""
    request = urllib.request.Request(f"http://{server.http}{path}", body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def _logits(server, rows: int = 1) -> np.ndarray:
    status, answer = _post(server, "/v2/models/mlp/infer", _body(rows))
    assert status == 200, answer
    return np.float32(answer["outputs"][0]["data"]).reshape(rows, 3)


@pytest.fixture(scope="module")
def folder(bundles, tmp_path_factory):
    """A folder with one bundle that tests may replace."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(bundles / "mlp", folder / "mlp")
    return folder


@pytest.fixture(scope="module")
def limited(folder, start_local):
    """A server with small limits, a token and an access log."""
    (folder.parent / "token").write_text("secret\n")
    return start_local(
        folder,
        "--max-body-bytes=2000",
        "--max-rows=8",
        "--control",
        f"--token-file={folder.parent / 'token'}",
        f"--access-log={folder.parent / 'access.jsonl'}",
    ).wait_ready()


def test_a_body_that_is_too_large_is_refused_with_the_limit(limited):
    status, answer = _post(limited, "/v2/models/mlp/infer", _body(300))

    assert status == 413
    assert "expected: at most 2000" in answer["error"]
    assert "--max-body-bytes" in answer["error"]


def test_grpc_says_that_a_request_is_too_large(limited):
    with grpc_client.InferenceServerClient(limited.grpc) as client:
        pixels = grpc_client.InferInput("pixels", [300, 16], "UINT8")
        pixels.set_data_from_numpy(np.zeros((300, 16), np.uint8))

        with pytest.raises(InferenceServerException, match="at most 2000") as caught:
            client.infer("mlp", [pixels])

    assert str(caught.value.status()) == "StatusCode.RESOURCE_EXHAUSTED"


def test_too_many_rows_are_refused(limited):
    status, answer = _post(limited, "/v2/models/mlp/infer", _body(9))

    assert status == 413
    assert answer["error"].startswith("The request has 9 rows.\n  expected: at most 8")


HOSTILE = {
    "no JSON": b"{",
    "a list": b"[]",
    "no inputs": b'{"inputs": 3}',
    "a negative size": b'{"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [-1]}]}',
    "a huge shape": b'{"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [99999999999,'
    b' 99999999999], "data": []}]}',
    "text for numbers": b'{"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [1, 16],'
    b' "data": ["a"]}]}',
    "a number that does not fit": b'{"inputs": [{"name": "pixels", "datatype": "UINT8",'
    b' "shape": [1, 1], "data": [256]}]}',
    "a fraction": b'{"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [1, 1],'
    b' "data": [0.5]}]}',
    "an unknown dtype": b'{"inputs": [{"name": "pixels", "datatype": "X", "shape": [], "data": []}]}',
    "bytes that are not there": b'{"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [1,'
    b' 16], "parameters": {"binary_data_size": 16}}]}',
    "a time of nothing": b'{"inputs": [], "parameters": {"timeout": -1}}',
    "deep brackets": b'{"inputs": ' + b"[" * 900 + b"]" * 900 + b"}",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_request_is_an_error_of_the_client(limited, case):
    status, answer = _post(limited, "/v2/models/mlp/infer", HOSTILE[case])

    assert status == 400
    assert answer["error"]
    assert limited.process.poll() is None


def test_a_malformed_request_is_counted_by_its_kind(limited):
    def count() -> float:
        with urllib.request.urlopen(f"http://{limited.http}/metrics") as response:
            lines = response.read().decode().splitlines()
        label = 'nitro_request_errors_total{kind="invalid",model="mlp"}'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(label))

    before = count()
    _post(limited, "/v2/models/mlp/infer", b"{")

    assert count() == before + 1


@pytest.mark.parametrize("name", ["..%2F..%2Fetc", "%2e%2e", "mlp%00", "a%0Ab", "nobody"])
def test_a_name_from_a_request_reaches_no_file(limited, name):
    token = {"Authorization": "Bearer secret"}

    status, answer = _post(limited, f"/v2/repository/models/{name}/load", **token)

    assert status == 404
    assert "There is no model" in answer.get("error", "") or answer == {"detail": "Not Found"}


def test_the_access_log_has_a_line_a_request_that_no_client_can_forge(limited, folder):
    nasty = 'x"}\n{"status": "OK", "forged": true'
    _post(limited, "/v2/models/mlp/infer", _body(2, id=nasty))
    _post(limited, "/v2/models/nobody/infer", _body(2, id=nasty))

    text = (folder.parent / "access.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    (answered,) = [line for line in lines if line["id"] == nasty]
    assert (answered["status"], answered["rows"], answered["protocol"]) == ("OK", 2, "rest")
    assert any(line["model"] == "nobody" and line["status"] == "NOT_FOUND" for line in lines)
    assert not any("forged" in line for line in lines)


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}])
def test_loading_needs_the_token(limited, header):
    status, answer = _post(limited, "/v2/repository/models/mlp/load", **header)

    assert status == 401
    assert "token" in answer["error"]


def test_control_is_off_unless_asked_for(bundles, start_local):
    server = start_local(bundles).wait_ready()
    status, answer = _post(server, "/v2/repository/models/mlp/unload")

    assert status == 403
    assert "--control" in answer["error"]
    assert server.end() == 0


def test_a_reload_swaps_whole_versions_and_a_broken_one_changes_nothing(
    limited, folder, write_bundle
):
    token = {"Authorization": "Bearer secret"}
    before = _logits(limited)
    data = (folder / "mlp" / "weights.safetensors").read_bytes()
    (folder / "mlp" / "weights.safetensors").write_bytes(data[:-4] + b"\0\0\0\0")

    status, answer = _post(limited, "/v2/repository/models/mlp/load", **token)

    assert status == 400
    assert "weights.safetensors" in answer["error"]
    np.testing.assert_array_equal(_logits(limited), before)
    shutil.rmtree(folder / "mlp")
    path = write_bundle(folder, seed=1)
    status, answer = _post(limited, "/v2/repository/models/mlp/load", **token)
    assert (status, answer) == (200, {})
    pixels = (np.arange(16).reshape(1, 16) % 251).astype(np.uint8)
    np.testing.assert_array_equal(_logits(limited), load_bundle(path)(pixels=pixels)["logits"])
    assert np.abs(_logits(limited) - before).max() > 0.1


def test_a_broken_bundle_harms_no_other_model(bundles, tmp_path, start_local):
    shutil.copytree(bundles / "mlp", tmp_path / "served" / "mlp")
    broken = tmp_path / "served" / "broken"
    shutil.copytree(bundles / "types", broken)
    (broken / "nitro.json").write_text('{"format": ' + "[" * 100_000)
    server = start_local(tmp_path / "served").wait_ready()

    index = {entry["name"]: entry for entry in _post(server, "/v2/repository/index")[1]}

    assert index["mlp"]["state"] == "READY"
    assert index["broken"]["state"] == "UNAVAILABLE"
    assert index["broken"]["reason"]
    assert _logits(server).shape == (1, 3)
    assert server.end() == 0


def test_a_changed_folder_is_noticed(bundles, tmp_path, start_local, write_bundle):
    shutil.copytree(bundles / "mlp", tmp_path / "mlp")
    server = start_local(tmp_path, "--poll=0.2").wait_ready()
    before = _logits(server)
    shutil.rmtree(tmp_path / "mlp")
    write_bundle(tmp_path, seed=2)

    deadline = time.monotonic() + 60
    status, answer = 503, None
    while time.monotonic() < deadline:
        status, answer = _post(server, "/v2/models/mlp/infer", _body(1))
        if status == 200 and answer["model_version"] != "1":
            break

    assert answer["model_version"] == "2"
    assert np.abs(np.float32(answer["outputs"][0]["data"]) - before[0]).max() > 0.1
    assert server.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_every_accepted_request_is_answered_when_the_server_ends(bundles, start_local, number):
    server = start_local(bundles).wait_ready()
    counts = asyncio.run(_load_until_it_ends(server, number))

    assert counts["answered"] > 20
    assert counts["lost"] == 0, counts
    assert server.end() == 0


async def _load_until_it_ends(server, number: int) -> dict[str, int]:
    """Asks from eight clients at once and ends the server in the middle of it."""
    counts = {"answered": 0, "refused": 0, "lost": 0}
    body = _body(2)

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    url = f"http://{server.http}/v2/models/mlp/infer"
                    async with session.post(url, data=body) as response:
                        ok = response.status == 200 and (await response.json())["outputs"]
                        counts["answered" if ok else "lost"] += 1
                except aiohttp.ClientConnectorError:
                    # A connection was refused: no request was accepted.
                    counts["refused"] += 1
                    return
                except Exception:  # noqa: BLE001 - an answer that did not come
                    counts["lost"] += 1
                    return

    tasks = [asyncio.create_task(ask()) for _ in range(8)]
    while counts["answered"] < 20:
        await asyncio.sleep(0.01)
    server.process.send_signal(number)
    await asyncio.gather(*tasks)
    return counts


def test_the_server_is_live_before_and_ready_after_its_models_are(bundles, start_local):
    server = start_local(bundles)
    seen = []
    while not seen or seen[-1] != 200:
        try:
            with urllib.request.urlopen(f"http://{server.http}/v2/health/live", timeout=5):
                pass
            with urllib.request.urlopen(f"http://{server.http}/v2/health/ready", timeout=5) as r:
                seen.append(r.status)
        except urllib.error.HTTPError as error:
            seen.append(error.code)
        except OSError:
            continue

    assert seen[0] == 503
    with urllib.request.urlopen(f"http://{server.http}/v2/models/mlp/ready") as response:
        assert json.load(response)["ready"]
    assert server.end() == 0


def test_requests_are_encrypted_where_a_certificate_is_given(bundles, tmp_path, start_local):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [*command.split(), *names, "-keyout", key, "-out", cert], check=True, capture_output=True
    )
    server = start_local(bundles, f"--tls-cert={cert}", f"--tls-key={key}")
    trusted = ssl.create_default_context(cafile=str(cert))
    port = server.http.rpartition(":")[2]
    url = f"https://localhost:{port}/v2/health/ready"

    status = 0
    while status != 200 and server.process.poll() is None:
        try:
            with urllib.request.urlopen(url, context=trusted, timeout=5) as response:
                status = response.status
        except OSError:
            time.sleep(0.1)

    assert status == 200, server.log.read_text()
    with grpc_client.InferenceServerClient(
        f"localhost:{server.grpc.rpartition(':')[2]}", ssl=True, root_certificates=str(cert)
    ) as client:
        assert client.is_server_ready()
    assert server.end() == 0


def test_a_client_that_goes_away_disturbs_nobody(limited):
    answers = []
    for _ in range(30):
        gone = http.client.HTTPConnection(limited.http, timeout=5)
        gone.request("POST", "/v2/models/mlp/infer", _body(4))
        gone.close()
        answers.append(_logits(limited, 2))

    for answer in answers:
        np.testing.assert_allclose(answer, answers[0], rtol=1e-5)


BEST = """
import numpy as np

def postprocess(outputs):
    return {"best": outputs["logits"].argmax(-1).astype(np.int32)[:, None]}
"""


def test_post_processing_runs_where_the_operator_asks_for_it(
    tmp_path, start_local, make_mlp, write
):
    best = ExportSpec("best", "int32", (1, 1))
    program = dataclasses.replace(make_mlp(), postprocess=BEST, client_outputs=(best,))
    bundle = load_bundle(write(program, tmp_path))
    server = start_local(tmp_path, "--postprocess", "--no-batching").wait_ready()

    with urllib.request.urlopen(f"http://{server.http}/v2/models/mlp") as response:
        metadata = json.load(response)
    _, answer = _post(server, "/v2/models/mlp/infer", _body(5))

    assert [output["name"] for output in metadata["outputs"]] == ["best"]
    pixels = (np.arange(80).reshape(5, 16) % 251).astype(np.uint8)
    expected = bundle(pixels=pixels)["logits"].argmax(-1)
    assert answer["outputs"][0]["data"] == expected.tolist()
    assert server.end() == 0


def test_a_folder_without_bundles_is_refused(tmp_path):
    from typer.testing import CliRunner

    from nitro.errors import ConfigError
    from nitro_serve._cli import app

    result = CliRunner().invoke(app, ["local", str(tmp_path)])

    assert isinstance(result.exception, ConfigError)
    assert "There is no bundle" in str(result.exception)
