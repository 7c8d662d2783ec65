"""``examples/lightning_strategy.py`` equals training on the concatenated batch."""

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

EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning_strategy.py"
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


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def trained_alone(epochs: int, accumulate: int = 1) -> dict[str, Tensor]:
    """What one process computes from the batches of both ranks at once."""
    model = network(0)
    optimizer = adamw(model.parameters())
    inputs, targets = dataset().tensors
    for _ in range(epochs):
        for first in range(0, BATCHES, accumulate):
            rows = slice(first * BATCH_SIZE * WORLD_SIZE, (first + accumulate) * 2 * BATCH_SIZE)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model.state_dict()


def lightning_run(rank: int, _world_size: int, folder: str) -> dict[str, Any]:
    """Everything that the tests below look at, in one start of the ranks."""
    os.environ["LOCAL_RANK"] = str(rank)  # tells Lightning that its ranks have been started
    import lightning.pytorch as pl
    from lightning_strategy import BucketedDDPStrategy

    class Module(pl.LightningModule):
        def __init__(self, *, manual: bool = False) -> None:
            super().__init__()
            self.network = network(seed=rank)  # rank 0's weights count
            self.register_buffer("seen", torch.zeros(()))
            self.automatic_optimization = not manual
            self.norms: list[float] = []

        def training_step(self, batch: Any, _index: int) -> Tensor:
            inputs, targets = batch
            self.seen += inputs.sum()
            loss = nn.functional.mse_loss(self.network(inputs), targets)
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
            return loss

        def on_after_backward(self) -> None:
            norm = nn.utils.get_total_norm(p.grad for p in self.parameters())
            self.norms.append(float(norm))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.parameters())

    class RankThenBatch(torch.utils.data.Sampler[int]):
        """Batch b of rank r holds the rows that one process sees in batch b."""

        def __iter__(self) -> Any:
            for batch in range(BATCHES):
                first = (batch * WORLD_SIZE + rank) * BATCH_SIZE
                yield from range(first, first + BATCH_SIZE)

        def __len__(self) -> int:
            return BATCHES * BATCH_SIZE

    def fit(module: Module, epochs: int, resume: str | None = None, **options: Any) -> pl.Trainer:
        if not options.pop("manual", False):
            options["gradient_clip_val"] = 0.5
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=WORLD_SIZE,
            strategy=BucketedDDPStrategy(bucket_size_mb=0.0005),
            max_epochs=epochs,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
            **options,
        )
        loader = torch.utils.data.DataLoader(
            dataset(), batch_size=BATCH_SIZE, sampler=RankThenBatch()
        )
        trainer.fit(module, loader, ckpt_path=resume, weights_only=True)
        return trainer

    def weights(module: Module) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in module.network.state_dict().items()}

    found: dict[str, Any] = {}
    module = Module()
    trainer = fit(module, 2, num_sanity_val_steps=0)
    found["two epochs"] = weights(module)
    found["norms"] = module.norms
    found["seen"] = float(module.seen)
    found["unwrapped"] = trainer.strategy.model is module
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    dist.barrier()
    resumed = Module()
    fit(resumed, 3, resume=f"{folder}/two.ckpt")
    found["resumed"] = weights(resumed)

    accumulating = Module()
    fit(accumulating, 1, accumulate_grad_batches=2)
    found["accumulated"] = weights(accumulating)
    manual = Module(manual=True)
    fit(manual, 1, manual=True)
    found["manual"] = weights(manual)
    found["manual norms"] = manual.norms

    try:
        pl.Trainer(
            accelerator="cpu",
            devices=WORLD_SIZE,
            strategy=BucketedDDPStrategy(find_unused_parameters=True),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
        ).fit(Module(), torch.utils.data.DataLoader(dataset(), batch_size=BATCH_SIZE))
    except TypeError as error:
        found["refused"] = str(error)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lightning")
    outcomes = run_ranks(
        lightning_run, WORLD_SIZE, str(folder), timeout=400.0, collective_timeout=120.0
    )
    checkpoint = torch.load(folder / "two.ckpt", weights_only=True)
    return [outcome.value | {"checkpoint": checkpoint} for outcome in outcomes]


def test_equals_single_process_training(results: list[dict[str, Any]]) -> None:
    for result in results:
        torch.testing.assert_close(result["two epochs"], trained_alone(2), **TOLERANCE)


def test_hooks_see_averaged_gradients(results: list[dict[str, Any]]) -> None:
    first, second = results
    assert len(first["norms"]) == 2 * BATCHES
    assert first["norms"] == second["norms"]
    assert first["manual norms"] == second["manual norms"]


def test_resumes_from_a_checkpoint_of_lightning(results: list[dict[str, Any]]) -> None:
    for result in results:
        torch.testing.assert_close(result["resumed"], trained_alone(3), **TOLERANCE)
    assert set(results[0]["checkpoint"]["state_dict"]) == {
        "network.0.weight",
        "network.0.bias",
        "network.2.weight",
        "network.2.bias",
        "seen",
    }


def test_accumulation(results: list[dict[str, Any]]) -> None:
    for result in results:
        torch.testing.assert_close(result["accumulated"], trained_alone(1, 2), **TOLERANCE)


def test_manual_optimization(results: list[dict[str, Any]]) -> None:
    for result in results:
        torch.testing.assert_close(result["manual"], trained_alone(1), **TOLERANCE)


def test_buffers_are_equal_after_training(results: list[dict[str, Any]]) -> None:
    first, second = results
    assert first["seen"] == second["seen"] != 0


def test_module_is_unwrapped_and_arguments_are_checked(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["unwrapped"]
        assert 'missing_gradients="skip-if-all"' in result["refused"]


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
    loss = float(done.stdout.rpartition("loss ")[2])
    assert loss < 1.0, "the untrained loss is about 8"
