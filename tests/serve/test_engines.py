"""What both engines answer to the real clients of the protocol."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

tc = pytest.importorskip("tritonclient.utils", reason="needs tritonclient: uv sync --group serve")
import tritonclient.grpc as grpc_client  # noqa: E402
import tritonclient.http as http_client  # noqa: E402

from nitro_export_stablehlo import load_bundle  # noqa: E402

OTHER_NAMES = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}
CLIENTS = {"http": http_client, "grpc": grpc_client}


@pytest.fixture(params=["http", "grpc"])
def client(request, engine):
    """A client of each protocol, with the module that it is from."""
    module = CLIENTS[request.param]
    made = module.InferenceServerClient(engine.http if request.param == "http" else engine.grpc)
    yield module, made
    made.close()


def _input(module, name: str, array: np.ndarray, *, binary: bool = True):
    made = module.InferInput(
        name, list(array.shape), OTHER_NAMES.get(array.dtype.name, array.dtype.name.upper())
    )
    if module is http_client:
        made.set_data_from_numpy(array, binary_data=binary)
    else:
        made.set_data_from_numpy(array)
    return made


def _pixels(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 255, (rows, 16), dtype=np.uint8)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_an_answer_is_bit_for_bit_what_the_bundle_gives(client, bundles, rows):
    module, server = client
    pixels = _pixels(rows)

    answer = server.infer("mlp", [_input(module, "pixels", pixels)], request_id="one")

    expected = load_bundle(bundles / "mlp")(pixels=pixels)["logits"]
    np.testing.assert_array_equal(answer.as_numpy("logits"), expected)
    response = answer.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "one"


def test_json_alone_gives_the_same_numbers(engine, bundles):
    pixels = _pixels(2)
    body = {"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [2, 16]}]}
    body["inputs"][0]["data"] = pixels.tolist()
    # As Triton's client sends it: without a content type.
    request = urllib.request.Request(
        f"http://{engine.http}/v2/models/mlp/infer", json.dumps(body).encode()
    )
    request.remove_header("Content-type")

    with urllib.request.urlopen(request) as response:
        (output,) = json.load(response)["outputs"]

    expected = load_bundle(bundles / "mlp")(pixels=pixels)["logits"]
    assert output["shape"] == [2, 3]
    np.testing.assert_array_equal(np.float32(output["data"]).reshape(2, 3), expected)


@pytest.mark.parametrize("binary", [True, False])
def test_every_dtype_arrives_and_returns(client, dtypes, binary):
    module, server = client
    if not binary and module is grpc_client:
        pytest.skip("gRPC has no JSON")
    names = [n for n in dtypes if binary or n not in ("float16", "bfloat16")]
    rng = np.random.default_rng(0)
    arrays = {n: rng.integers(0, 2, (2, 3)).astype(dtype) for n, dtype in dtypes.items()}

    inputs = [_input(module, n, a, binary=binary or n not in names) for n, a in arrays.items()]
    answer = server.infer("types", inputs)

    for name, array in arrays.items():
        expected = ~array if name == "bool" else array + array
        got = answer.as_numpy(f"{name}_out")
        np.testing.assert_array_equal(got, expected.astype(got.dtype))


def test_only_the_outputs_asked_for_are_sent(client, dtypes):
    module, server = client
    arrays = {name: np.ones((1, 3), dtype) for name, dtype in dtypes.items()}
    wanted = [module.InferRequestedOutput("int8_out")]

    answer = server.infer(
        "types", [_input(module, n, a) for n, a in arrays.items()], outputs=wanted
    )

    response = answer.get_response(as_json=True) if module is grpc_client else answer.get_response()
    assert [output["name"] for output in response["outputs"]] == ["int8_out"]


def test_rows_along_another_axis_are_right(client, bundles):
    module, server = client
    series = np.random.default_rng(1).normal(size=(6, 3, 4)).astype(np.float32)

    answer = server.infer("sideways", [_input(module, "series", series)])

    expected = load_bundle(bundles / "sideways")(series=series)
    for name, array in expected.items():
        np.testing.assert_array_equal(answer.as_numpy(name), array)


def test_sequences_of_any_length_are_answered(client, bundles):
    module, server = client
    for length in (5, 9):
        x = np.random.default_rng(length).normal(size=(2, length, 3)).astype(np.float32)

        answer = server.infer("open", [_input(module, "x", x)])

        expected = load_bundle(bundles / "open")(x=x)["h"]
        np.testing.assert_array_equal(answer.as_numpy("h"), expected)


def test_the_metadata_is_that_of_the_bundle(client):
    module, server = client

    metadata = server.get_model_metadata("mlp")

    if module is grpc_client:
        metadata = server.get_model_metadata("mlp", as_json=True)
    (pixels,), (logits,) = metadata["inputs"], metadata["outputs"]
    assert metadata["versions"] == ["1"]
    assert (pixels["name"], pixels["datatype"]) == ("pixels", "UINT8")
    assert [int(size) for size in pixels["shape"]] == [-1, 16]
    assert [int(size) for size in logits["shape"]] == [-1, 3]


def test_the_server_and_its_models_say_how_they_are(client):
    _, server = client

    assert server.is_server_live()
    assert server.is_server_ready()
    assert server.is_model_ready("mlp")
    assert server.is_model_ready("mlp", "1")
    assert not server.is_model_ready("nobody")


def test_configuration_and_index_and_statistics_are_there(client):
    module, server = client
    asked = {"as_json": True} if module is grpc_client else {}
    server.infer("mlp", [_input(module, "pixels", _pixels(1))])

    config = server.get_model_config("mlp", **asked)
    config = config.get("config", config)
    index = server.get_model_repository_index(**asked)
    (statistics,) = server.get_inference_statistics("mlp", **asked)["model_stats"]

    assert int(config["max_batch_size"]) == 16
    assert config["input"][0]["data_type"] == "TYPE_UINT8"
    models = index["models"] if isinstance(index, dict) else index
    assert {m["name"] for m in models} == {"mlp", "types", "sideways", "open"}
    assert int(statistics["inference_count"]) >= 1


MISTAKES = {
    "an unknown model": ("nobody", "pixels", np.zeros((1, 16), np.uint8), ""),
    "an unknown version": ("mlp", "pixels", np.zeros((1, 16), np.uint8), "7"),
    "an unknown input": ("mlp", "pixel", np.zeros((1, 16), np.uint8), ""),
    "another dtype": ("mlp", "pixels", np.zeros((1, 16), np.int32), ""),
    "another shape": ("mlp", "pixels", np.zeros((1, 15), np.uint8), ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_of_the_request_alone(client, mistake):
    module, server = client
    model, name, array, version = MISTAKES[mistake]

    with pytest.raises(tc.InferenceServerException) as caught:
        server.infer(model, [_input(module, name, array)], model_version=version)

    status = str(caught.value.status())
    assert status in {"400", "404", "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND"}
    right = server.infer("mlp", [_input(module, "pixels", _pixels(1))])
    assert right.as_numpy("logits").shape == (1, 3)


def test_requests_at_once_get_their_own_answers(engine, bundles):
    import tritonclient.http.aio as aio

    bundle = load_bundle(bundles / "mlp")
    requests = [_pixels(1 + seed % 5) + np.uint8(seed) for seed in range(60)]

    async def ask_all():
        async with aio.InferenceServerClient(engine.http, conn_limit=20) as server:
            calls = [server.infer("mlp", [_input(http_client, "pixels", p)]) for p in requests]
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask_all())

    for pixels, answer in zip(requests, answers, strict=True):
        # A request that was joined with others ran in a program of another size.
        expected = bundle(pixels=pixels)["logits"]
        np.testing.assert_allclose(answer.as_numpy("logits"), expected, rtol=1e-5, atol=1e-6)


def test_a_model_is_unloaded_and_loaded_again(client):
    _, server = client
    server.unload_model("sideways")
    deadline = time.monotonic() + 30
    while server.is_model_ready("sideways") and time.monotonic() < deadline:
        pass
    assert not server.is_model_ready("sideways")

    server.load_model("sideways")

    assert server.is_model_ready("sideways")


def test_prometheus_counts_what_was_answered(local):
    with urllib.request.urlopen(f"http://{local.http}/metrics") as response:
        text = response.read().decode()

    assert 'nitro_requests_total{model="mlp",version="1"}' in text
    assert 'nitro_batch_rows_count{model="mlp"}' in text


KSERVE_CLIENT = """
import asyncio, sys
import numpy as np
sys.argv, (address,) = sys.argv[:1], sys.argv[1:]
from kserve import InferInput, InferRequest, InferenceRESTClient, RESTConfig

async def main():
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    base = f"http://{address}"
    pixels = np.arange(32, dtype=np.uint8).reshape(2, 16)
    for binary in (True, False):
        tensor = InferInput("pixels", [2, 16], "UINT8")
        tensor.set_data_from_numpy(pixels, binary_data=binary)
        request = InferRequest("mlp", [tensor])
        answer = await client.infer(base, request, model_name="mlp")
        print(answer.outputs[0].as_numpy().tobytes().hex())
    await client.close()

asyncio.run(main())
"""


def test_the_client_of_kserve_gets_the_same_bits(engine, bundles, tmp_path):
    script = tmp_path / "client.py"
    script.write_text(KSERVE_CLIENT)
    # In a process of its own: the messages of kserve and tritonclient clash.
    command = [sys.executable, "-W", "ignore", str(script), engine.http]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    pixels = np.arange(32, dtype=np.uint8).reshape(2, 16)
    expected = load_bundle(bundles / "mlp")(pixels=pixels)["logits"].tobytes().hex()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [expected, expected]
