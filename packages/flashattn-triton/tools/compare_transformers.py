"""Which model families of the installed transformers library run with this package's attention.

    python packages/flashattn-triton/tools/compare_transformers.py [--families llama bert] [--write]

Every configuration in transformers' registry is made small (two layers, heads of 8, no dropout),
its base model is built twice with the same random weights, with attn_implementation "eager" and
with the package's alias, and both compute the same batch in fp32 on the CPU: 2 rows of 19 tokens,
once without and once with padding on the left, or 2 images of 32 x 32, or 2 rows of sound. A family
runs if the largest difference is at most 1e-4 of the largest result. One of which no recipe makes a
small model that runs has the reason beside it. ``--write`` renders the table of
``docs/transformers-families.md``.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from flashattn_triton.integrations.transformers import ALIAS, attention_forward, register

PAGE = Path(__file__).parents[1] / "docs" / "transformers-families.md"
TOLERANCE = 1e-4
LARGEST = 5_000_000  # parameters of a small model
# Settings by the names that families have for them.
SMALL = {
    "vocab_size": 61, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32,
    "intermediate_size": 48, "d_ff": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "ffn_dim": 48,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "max_position_embeddings": 64,
    "n_positions": 64, "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 1, "embedding_size": 32, "word_embed_proj_dim": 32,
    "sliding_window": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "image_size": 32, "patch_size": 8, "num_mel_bins": 8, "max_source_positions": 10,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "decoder_start_token_id": 1,
}  # fmt: skip


# What some families need instead: one setting or more changed, or left out where it is None. They
# are tried one after another.
CHANGES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"head_dim": None, "num_key_value_heads": 4},
    {"head_dim": 128},
    {"head_dim": 64},
    {"num_key_value_heads": None},
    {"head_dim": None, "v_head_dim": None, "qk_nope_head_dim": None, "qk_rope_head_dim": None},
    {"hidden_size": 512, "head_dim": None, "num_key_value_heads": 4},
    {"hidden_size": 256, "head_dim": None, "num_key_value_heads": 4},
    {"patch_size": None, "image_size": None, "hidden_size": None},
]
_REFUSED_FIELD = re.compile(r"for field '(\w+)'")


def small(config_class: Any, changes: Mapping[str, Any] | None = None) -> Any:
    """A small configuration without dropout; settings that a family does not have are left out."""
    names = set(vars(config_class())) | set(getattr(config_class, "attribute_map", {}))
    wanted = {**SMALL, **(changes or {})}
    given = {k: v for k, v in wanted.items() if k in names and v is not None}
    while True:
        try:
            config = config_class(**given)
            break
        except Exception as error:  # a field of another type, such as one number for each stage
            refused = _REFUSED_FIELD.search(str(error))
            if refused is None or refused[1] not in given:
                raise
            del given[refused[1]]
    for name, part in config_class.sub_configs.items():
        kind = type(getattr(config, name, None)) if part is transformers.AutoConfig else part
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedConfig):
            setattr(config, name, small(kind, changes))
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def batches(model: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """What the model takes, and which tokens are compared, without and with padding."""
    names = inspect.signature(model.forward).parameters
    required = {name for name, x in names.items() if x.default is x.empty}
    ids = torch.randint(3, 61, (2, 19), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    for name in ("input_values", "input_features"):
        if name in required or (name in names and "input_ids" not in names):
            bins = getattr(model.config, "num_mel_bins", 8)
            sizes = (2, 1600) if name == "input_values" else (2, bins, 20)
            yield {name: torch.randn(sizes, generator=generator)}, None
            return
    channels = getattr(model.config, "num_channels", 3)
    images = {"pixel_values": torch.randn(2, channels, 32, 32, generator=generator)}
    if "input_ids" not in names:
        yield images, None
        return
    inputs: dict[str, Any] = {"input_ids": ids}
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = ids[:, :7]
    if "use_cache" in names:
        inputs["use_cache"] = False
    if "bbox" in names:
        inputs["bbox"] = torch.zeros(2, 19, 4, dtype=torch.int64)
    if "pixel_values" in names and not hasattr(model.config, "image_token_id"):
        inputs |= images
    yield inputs, None
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    kept = None if "decoder_input_ids" in names else mask.bool()
    yield {**inputs, "attention_mask": mask}, kept


def difference(model_class: Any, config: Any) -> float:
    """The largest difference between both implementations, in units of the largest result."""
    torch.manual_seed(0)
    ours = model_class._from_config(copy.deepcopy(config), attn_implementation=ALIAS).eval()
    theirs = model_class._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
        theirs.load_state_dict(ours.state_dict())
        worst = 0.0
        for inputs, kept in batches(ours):
            out, expected = (seeded(model, inputs) for model in (ours, theirs))
            if kept is not None and out.shape[:2] == kept.shape:
                out, expected = out[kept], expected[kept]
            scale = float(expected.abs().max())
            worst = max(worst, float((out - expected).abs().max()) / max(scale, 1e-30))
    return worst


def seeded(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """A model's first result; some choose tokens to mask at random."""
    torch.manual_seed(3)
    return cast(torch.Tensor, model(**inputs)[0])


_calls: list[str] = []  # one entry for each call of the package's attention


def counted(*args: Any, **keywords: Any) -> Any:
    """The package's attention, counted."""
    _calls.append(ALIAS)
    return attention_forward(*args, **keywords)


def compare(family: str, model_name: str) -> tuple[str, str]:
    """A verdict on one family, and a reason or the difference."""
    model_class = getattr(transformers, model_name, None)
    if model_class is None:
        return "not tried", f"transformers has no {model_name}"
    reason, config = "", None
    for changes in CHANGES:
        try:
            made = small(model_class.config_class, changes)
            run_eager(model_class, made)
        except Exception as error:  # noqa: BLE001 - this recipe does not fit the family
            reason = reason or reason_of(error)
        else:
            config = made
            break
    if config is None:
        return not_tried(model_class, reason)
    _calls.clear()
    try:
        found = difference(model_class, config)
    except Exception as error:  # noqa: BLE001 - the error is what the table says
        text = " ".join(str(error).split())
        refused = isinstance(error, ValueError) and ("triton" in text or "attn_impl" in text)
        if "computes its attention itself" in text:
            return "refused", "computes its attention itself"
        return "refused" if refused else "fails", f"{type(error).__name__}: {text[:90]}"
    if not _calls:
        return "not used", "asks no implementation"
    if found <= TOLERANCE:
        return "runs", f"{found:.0e}"
    return "differs", f"{found:.0e}"


def run_eager(model_class: Any, config: Any) -> None:
    """Runs the library's own model; raises if it cannot be built small, or does not run."""
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError("the small model is not small")
    torch.manual_seed(0)
    eager = model_class._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for inputs, _ in batches(eager):
            assert isinstance(eager(**inputs)[0], torch.Tensor)


def reason_of(error: Exception) -> str:
    """Why a recipe does not fit, in a few words."""
    text = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return f"needs {text.split('requires the ')[-1].split(' ')[0]}, which is not installed"
    missing = re.search(r"missing \d+ required positional arguments?: (.*)", text)
    if missing:
        return f"takes {missing[1].replace(chr(39), '')}"
    return text if text.startswith("the small") else f"{type(error).__name__}: {text[:80]}"


def not_tried(model_class: Any, reason: str) -> tuple[str, str]:
    """The verdict on a family of which no recipe makes a small model that runs."""
    if reason.startswith("needs "):
        return "not tried", reason
    contents = vars(sys.modules.get(model_class.__module__, object))
    parts = [
        getattr(part, "model_type", "") or "any"
        for name, part in model_class.config_class.sub_configs.items()
    ]
    if "ALL_ATTENTION_FUNCTIONS" not in contents and not parts:
        return "not used", "its file asks no implementation"
    if parts:
        return "parts", f"puts {', '.join(parts)} together; {reason}"
    return "not tried", reason


def rows(families: list[str] | None) -> list[tuple[str, str, str]]:
    """Family, verdict, and difference or reason, of all families or of some."""
    found = []
    for family, name in sorted(MODEL_MAPPING_NAMES.items()):
        if families is None or family in families:
            model_name = name if isinstance(name, str) else name[0]
            found.append((family, *compare(family, model_name)))
            print("  ".join(found[-1]), flush=True)
    return found


def page(found: list[tuple[str, str, str]]) -> str:
    """The documentation page."""
    assert __doc__ is not None
    counts = Counter(verdict for _, verdict, _ in found)
    lines = [
        "# Families of transformers",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}. "
        "Written by `tools/compare_transformers.py --write`; a nightly test checks a sample.",
        "",
        *__doc__.split("\n\n")[2].strip().split("\n"),
        "",
        "| verdict | families | meaning |",
        "|---|---:|---|",
        f"| runs | {counts['runs']} | same results as the library's eager implementation |",
        f"| not used | {counts['not used']} | the model computes attention itself |",
        f"| refused | {counts['refused']} | an error with a reason, when built or called |",
        f"| fails | {counts['fails']} | another error |",
        f"| differs | {counts['differs']} | more than the tolerance |",
        f"| parts | {counts['parts']} | puts other families together, which have their own lines |",
        f"| not tried | {counts['not tried']} | no recipe makes a small model that runs |",
        "",
        "| family | verdict | largest difference, or reason |",
        "|---|---|---|",
    ]
    lines += [
        f"| {family} | {verdict} | {reason.replace('|', '/')} |"
        for family, verdict, reason in found
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Compares, prints, and with ``--write`` writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--families", nargs="+", help="only these")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    register()
    transformers.AttentionInterface.register(ALIAS, counted)
    found = rows(arguments.families)
    if arguments.write:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
