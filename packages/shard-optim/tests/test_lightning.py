"""``examples/sharded_lightning_strategies.py`` equals training on the concatenated batch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import run_ranks

EXAMPLE = Path(__file__).parents[3] / "examples" / "sharded_lightning_strategies.py"
BATCHES, BATCH_SIZE, WORLD_SIZE = 6, 4, 2
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}  # the same terms, summed in another order
# Importing Lightning for the first time compiles it, in every rank, on cores that may be busy.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("ignore::Warning:lightning"),  # what Lightning's own modules advise
]


def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCHES * BATCH_SIZE * WORLD_SIZE, 8, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


HYPERPARAMETERS = {"lr": 0.05, "weight_decay": 0.1}


def trained_alone(epochs: int, *, accumulate: int = 1, clip_value: float | None = None) -> Any:
    """What one process computes from the batches of both ranks at once."""
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPERPARAMETERS)
    inputs, targets = dataset().tensors
    for _ in range(epochs):
        for first in range(0, BATCHES, accumulate):
            rows = slice(first * BATCH_SIZE * WORLD_SIZE, (first + accumulate) * 2 * BATCH_SIZE)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
            if clip_value is None:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            else:
                nn.utils.clip_grad_value_(model.parameters(), clip_value)
            optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def lightning_run(rank: int, _world_size: int, folder: str) -> dict[str, Any]:
    """Everything that the tests below look at, in one start of the ranks."""
    os.environ["LOCAL_RANK"] = str(rank)  # tells Lightning that its ranks have been started
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from sharded_lightning_strategies import FullyShardedStrategy, ShardedOptimizerStrategy

    from shard_optim import ShardedOptimizer

    class Module(pl.LightningModule):
        def __init__(self, *, manual: bool = False) -> None:
            super().__init__()
            self.network = network(seed=rank)  # rank 0's weights count
            self.automatic_optimization = not manual
            self.losses: list[float] = []

        def loss(self, batch: Any) -> Tensor:
            inputs, targets = batch
            return nn.functional.mse_loss(self.network(inputs), targets)

        def training_step(self, batch: Any, _index: int) -> Tensor:
            loss = self.loss(batch)
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.losses.append(float(self.loss(batch)))

        def configure_optimizers(self) -> Any:
            optimizer = self.optimizer()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]

        def optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), **HYPERPARAMETERS)

    class Sharded(Module):
        def optimizer(self) -> torch.optim.Optimizer:
            return ShardedOptimizer(
                self.parameters(), torch.optim.AdamW, reduce_gradients=True, **HYPERPARAMETERS
            )

    class OnMeta(Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = None

        def configure_model(self) -> None:
            if self.network is None:
                with torch.device("meta"):
                    self.network = network(0)

    class RankThenBatch(torch.utils.data.Sampler[int]):
        """Batch b of rank r holds the rows that one process sees in batch b."""

        def __iter__(self) -> Any:
            for batch in range(BATCHES):
                first = (batch * WORLD_SIZE + rank) * BATCH_SIZE
                yield from range(first, first + BATCH_SIZE)

        def __len__(self) -> int:
            return BATCHES * BATCH_SIZE

    loader = torch.utils.data.DataLoader(dataset(), batch_size=BATCH_SIZE, sampler=RankThenBatch())

    def fit(module: Module, strategy: Any, epochs: int = 1, **options: Any) -> pl.Trainer:
        resume = options.pop("resume", None)
        if module.automatic_optimization:
            options.setdefault("gradient_clip_val", 0.5)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=WORLD_SIZE,
            strategy=strategy,
            max_epochs=epochs,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            **{"enable_checkpointing": False, **options},
        )
        trainer.fit(module, loader, ckpt_path=resume, weights_only=True)
        return trainer

    def weights(module: Module) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in module.network.state_dict().items()}

    def whole(trainer: pl.Trainer) -> dict[str, Tensor]:
        found = trainer.strategy.model.full_parameters()
        return {name.removeprefix("network."): value for name, value in found.items()}

    found: dict[str, Any] = {}
    module = Sharded()
    trainer = fit(module, ShardedOptimizerStrategy(), 2)
    found["stage 2"] = weights(module)
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    dist.barrier()
    module = Sharded()
    fit(module, ShardedOptimizerStrategy(), 3, resume=f"{folder}/two.ckpt")
    found["stage 2 resumed"] = weights(module)
    module = Sharded()
    fit(module, ShardedOptimizerStrategy(), accumulate_grad_batches=2)
    found["stage 2 accumulated"] = weights(module)
    module = Sharded()
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    fit(module, ShardedOptimizerStrategy(), **options)
    found["stage 2 clipped by value"] = weights(module)
    module = Sharded(manual=True)
    fit(module, ShardedOptimizerStrategy())
    found["stage 2 manual"] = weights(module)

    callback = ModelCheckpoint(dirpath=f"{folder}/stage3", save_last=True, save_top_k=1)
    options = {"callbacks": [callback], "enable_checkpointing": True}
    module = Module()
    trainer = fit(module, FullyShardedStrategy(), 2, **options)
    found["stage 3"] = whole(trainer)
    found["sizes"] = [param.numel() for param in module.parameters()]
    trainer.validate(module, loader, verbose=False)
    found["validated"] = module.losses
    module = OnMeta()
    trainer = fit(module, FullyShardedStrategy(), 3, resume=f"{folder}/stage3/last.ckpt")
    found["stage 3 resumed"] = whole(trainer)
    trainer = fit(Module(), FullyShardedStrategy(), accumulate_grad_batches=2)
    found["stage 3 accumulated"] = whole(trainer)
    found["stage 3 manual"] = whole(fit(Module(manual=True), FullyShardedStrategy()))

    try:
        fit(Module(), ShardedOptimizerStrategy())
    except TypeError as error:
        found["refused"] = str(error)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    outcomes = run_ranks(
        lightning_run, WORLD_SIZE, str(folder), timeout=400.0, collective_timeout=120.0
    )
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
def test_equals_single_process_training(results: list[dict[str, Any]], stage: str) -> None:
    two, three = trained_alone(2)[0], trained_alone(3)[0]
    accumulated = trained_alone(1, accumulate=2)[0]
    for result in results:
        torch.testing.assert_close(result[stage], two, **TOLERANCE)
        torch.testing.assert_close(result[f"{stage} resumed"], three, **TOLERANCE)
        torch.testing.assert_close(result[f"{stage} accumulated"], accumulated, **TOLERANCE)
        torch.testing.assert_close(result[f"{stage} manual"], trained_alone(1)[0], **TOLERANCE)


def test_clipping_by_value_looks_at_shards(results: list[dict[str, Any]]) -> None:
    expected, _ = trained_alone(1, clip_value=0.01)
    for result in results:
        torch.testing.assert_close(result["stage 2 clipped by value"], expected, **TOLERANCE)


def test_file_of_stage_2_continues_in_the_plain_optimizer(
    results: list[dict[str, Any]], folder: Path
) -> None:
    assert results
    saved = torch.load(folder / "two.ckpt", weights_only=True)
    [state] = saved["optimizer_states"]
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPERPARAMETERS)
    optimizer.load_state_dict(state)
    expected = trained_alone(2)[1]["state"]
    torch.testing.assert_close(optimizer.state_dict()["state"], expected, **TOLERANCE)


def test_stage_3_holds_shards_and_validates(results: list[dict[str, Any]], folder: Path) -> None:
    whole = sum(param.numel() for param in network(0).parameters())
    replicated = 16 + 1  # the biases
    for result in results:
        assert sum(result["sizes"]) == (whole - replicated) // WORLD_SIZE + replicated
        assert len(result["validated"]) == BATCHES
    assert {path.name for path in (folder / "stage3").iterdir()} == {
        "last.ckpt",
        "epoch=1-step=12.ckpt",
    }


def test_another_optimizer_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "Return ShardedOptimizer(self.parameters(), AdamW" in result["refused"]


def test_the_program_learns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.rpartition("loss ")[2]) for line in done.stdout.splitlines() if "loss " in line
    ]
    assert len(losses) == 2, done.stdout
    assert max(losses) < 1.0, "the untrained loss is about 8"
