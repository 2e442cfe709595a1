"""Steps per second of Keras, PyTorch or Lightning on a workload of `train_step.py`.

    PYTHON benchmarks/peers.py keras|torch|lightning mlp32 [--laps 3] [--steps 1536]

Runs in an interpreter that has the peer installed; prints one JSON line. Keras has no
RAdam, so it runs Adam; the others run RAdam, as Nitro does.
"""

import argparse
import itertools
import json
import os
import statistics
import time

import numpy as np

SIZES = {"mlp32": (32, 1536), "mlp256": (256, 192), "cnn64": (64, 16), "deep64": (64, 512)}
RATE, SMOOTHING, DEPTH, WIDTH = 1e-3, 0.1, 40, 64


def random_images(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one lap; what is in them does not change the speed."""
    batch, steps = SIZES[name]
    rng = np.random.default_rng(0)
    img = rng.random((batch * steps, 784), np.float32)
    return img, rng.integers(0, 10, batch * steps)


def widths(name: str) -> list[int]:
    return [784, 128, 10] if name.startswith("mlp") else [784, *[WIDTH] * (DEPTH - 1), 10]


def keras_laps(name: str, laps: int) -> list[float]:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    layers = keras.layers
    img, label = random_images(name)
    if name == "cnn64":
        stack = [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
        img = img.reshape(-1, 28, 28, 1)
    else:
        inner = [layers.Dense(n, activation="relu") for n in widths(name)[1:-1]]
        stack = [keras.Input((784,)), *inner, layers.Dense(10)]
    model = keras.Sequential(stack)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=SMOOTHING)
    model.compile(optimizer=keras.optimizers.Adam(RATE), loss=loss)
    targets = np.eye(10, dtype=np.float32)[label]

    def lap() -> None:
        model.fit(img, targets, batch_size=SIZES[name][0], epochs=1, verbose=0)

    return timed(lap, laps)


def torch_model(name: str):
    from torch import nn

    if name == "cnn64":
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(12 * 12 * 64, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    sizes = widths(name)
    layers = []
    for inner, outer in itertools.pairwise(sizes):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def torch_laps(name: str, laps: int) -> list[float]:
    import torch
    from torch.nn.functional import cross_entropy

    batch, steps = SIZES[name]
    img, label = map(torch.from_numpy, random_images(name))
    model = torch_model(name)
    optimizer = torch.optim.RAdam(model.parameters(), RATE)

    def lap() -> None:
        for rows in torch.randperm(batch * steps).reshape(steps, batch):
            optimizer.zero_grad()
            loss = cross_entropy(model(img[rows]), label[rows], label_smoothing=SMOOTHING)
            loss.backward()
            optimizer.step()

    return timed(lap, laps)


def lightning_laps(name: str, laps: int) -> list[float]:
    import lightning
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch_model(name)
            self.times: list[float] = []

        def training_step(self, batch, index):
            return cross_entropy(self.net(batch[0]), batch[1], label_smoothing=SMOOTHING)

        def configure_optimizers(self):
            return torch.optim.RAdam(self.parameters(), RATE)

        def on_train_epoch_start(self):
            self.times.append(time.perf_counter())

        def on_train_end(self):
            self.times.append(time.perf_counter())

    data = TensorDataset(*map(torch.from_numpy, random_images(name)))
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=laps + 1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=SIZES[name][0], shuffle=True))
    return list(np.diff(module.times))[1:]


def timed(lap, laps: int) -> list[float]:
    lap()
    seconds = []
    for _ in range(laps):
        begin = time.perf_counter()
        lap()
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=["keras", "torch", "lightning"])
    parser.add_argument("workload", choices=sorted(SIZES))
    parser.add_argument("--laps", type=int, default=3)
    words = parser.parse_args()
    measure = {"keras": keras_laps, "torch": torch_laps, "lightning": lightning_laps}[words.peer]
    seconds = measure(words.workload, words.laps)
    print(json.dumps({words.peer: SIZES[words.workload][1] / statistics.median(seconds)}))


if __name__ == "__main__":
    main()
