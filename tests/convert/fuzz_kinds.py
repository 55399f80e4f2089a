"""What is fuzzed: small valid inputs of every kind, what is changed in them, who reads them.

A case is a set of files below a folder of inputs. Its steps are calls of the converter; each ends
with a result or a DFlash2Error, and those that write name the one file that may appear.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from dflash2_gguf.check import find_facts
from dflash2_gguf.convert.inspection import inspect, render
from dflash2_gguf.convert.migration import plan_migration, write_migrated
from dflash2_gguf.convert.pipeline import check_outputs, make_plan, run
from dflash2_gguf.presets import load_preset
from tests.convert import checkpoints, old_files, pairs
from tests.convert.gguf_mutators import gguf_file, names_in_gguf
from tests.convert.mutators import Words, json_file, raw_bytes, safetensors_file, torch_file

__all__ = ["KINDS", "Case", "Kind", "Step", "mutated", "words_of"]

Files = Mapping[str, bytes]
# called with the folders of inputs and outputs; the file it wrote, None when it writes none
Step = Callable[[Path, Path], Path | None]
OUTPUT = "out.gguf"

_PRESETS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m", "iq4_nl")
_SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_WORDS_OF_CONFIGS = (
    *("quantization_config", "quant_method", "format", "config_groups", "group_0", "weights"),
    *("num_bits", "strategy", "group_size", "symmetric", "actorder", "bits", "desc_act", "ignore"),
    *("weight_block_size", "modules_to_not_convert", "checkpoint_format", "version", "zero_point"),
    *("quant_algo", "text_config", "rope_scaling", "rope_theta", "rope_type", "type", "factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale"),
    *("partial_rotary_factor", "rope_dim", "rope_is_neox_style", "low_freq_factor", "license"),
    *("high_freq_factor", "mrope_section", "causal", "use_swa", "swa_window_size", "dtype"),
    *("attention_sink_bias", "attention_value_scale", "draft_vocab_size", "input_embedding_scale"),
    *("output_multiplier", "final_logit_softcapping", "target_hidden_size", "has_own_lm_head"),
    *("attention_bias", "mlp_bias", "projector_type", "logit_scale", "speculators_model_type"),
    *("transformer_layer_config", "aux_hidden_state_layer_ids", "sliding_window_non_causal"),
    *("_name_or_path", "license_name", "license_link", "auto_map", "max_window_layers"),
)
_WORDS_OF_TENSORS = (
    *("embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "model.norm.weight", "layers.9.x"),
    *("layers.0.self_attn.q_proj.weight_scale", "layers.0.self_attn.q_proj.weight_packed"),
    *("layers.0.self_attn.q_proj.qweight", "layers.0.self_attn.q_proj.g_idx", "verifier_norm"),
    *("layers.0.self_attn.attention_sink_bias", "layers.0.self_attn.sinks", "__metadata__"),
    *("layers.-1.mlp.up_proj.weight", "layers.99999999999999999999.mlp.up_proj.weight"),
    *("blk.0.attn_sinks", "blk.99.ffn_up.weight", "token_embd.weight", "output.weight"),
    *("blk.4294967296.ffn_up.weight", "rope_freqs.weight", "fc.weight.in_sum2", "x.counts"),
)
_WORDS_OF_GGUF = (
    *("general.alignment", "general.architecture", "general.type", "split.count", "split.no"),
    *("general.file_type", "general.tags", "general.license", "general.base_model.0.name"),
    *("dflash.rope.scaling.type", "dflash.rope.scaling.factor", "dflash.rope.dimension_count"),
    *("dflash.rope.dimension_sections", "dflash.embedding_scale", "dflash.vocab_size"),
    *("dflash.attention.sliding_window_pattern", "dflash.target_layer_ids", "dflash.mask_token_id"),
    *("dflash-draft.dflash.target_layer_ids", "dflash-draft.block_size", "tokenizer.ggml.scores"),
    *("tokenizer.ggml.pre", "tokenizer.ggml.model", "tokenizer.chat_template", "dflash2.source"),
    *("llama.nextn_predict_layers", "llama.rope.dimension_sections", "quantize.imatrix.file"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Files that go together, and which of them may be changed."""

    files: Files
    mutable: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """``cases`` builds valid inputs in a folder once; ``steps`` are what is done with a case.

    ``share``: how many runs of this kind come with each of the slowest kinds.
    """

    cases: Callable[[Path], list[Case]]
    steps: Callable[[Random, Case], list[Step]]
    share: int = 4


def _read(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".bare"
    }


def _case(folder: Path, *mutable: str, **options: Any) -> Case:
    files = _read(folder)
    chosen = tuple(name for name in files if any(name.startswith(part) for part in mutable))
    return Case(files=files, mutable=chosen, options=options)


def mutated(rng: Random, case: Case, words: Words) -> dict[str, bytes]:
    """The files of a case with one or two of them changed, each by its own kind of change."""
    files = dict(case.files)
    for name in rng.sample(case.mutable, min(len(case.mutable), rng.choice((1, 1, 1, 2)))):
        try:
            files[name] = _changed(rng, name, files[name], case, words)
        except Exception:
            # two changes to one place that do not go together
            files[name] = raw_bytes(rng, files[name])
    return files


def _changed(rng: Random, name: str, data: bytes, case: Case, words: Words) -> bytes:
    if name.endswith((".pt", ".bin")):
        return torch_file(rng, case.options["state"]())
    if name.endswith(".safetensors"):
        return safetensors_file(rng, data, words)
    if name.endswith(".gguf"):
        return gguf_file(rng, data, words)
    return json_file(rng, data, words) if name.endswith(".json") else raw_bytes(rng, data)


def words_of(cases: list[Case]) -> Words:
    """What the valid files of a kind say, with names that only other files have."""
    keys: dict[str, None] = dict.fromkeys((*_WORDS_OF_CONFIGS, *_WORDS_OF_TENSORS, *_WORDS_OF_GGUF))
    values: list[Any] = []
    for case in cases:
        for name in case.mutable:
            data = case.files[name]
            if name.endswith(".json"):
                tree = json.loads(data)
                keys |= dict.fromkeys(tree)
                values += tree.values()
            elif name.endswith(".safetensors"):
                (length,) = struct.unpack_from("<Q", data)
                keys |= dict.fromkeys(json.loads(data[8 : 8 + length]))
            elif name.endswith(".gguf"):
                keys |= dict.fromkeys(names_in_gguf(data))
    return Words(keys=tuple(keys), values=tuple(values))


# --- valid inputs


def _checkpoint(
    folder: Path, *, change: Callable[[Any], Any] = lambda values: values, **options: Any
) -> Path:
    """``c``, a checkpoint, and ``target.gguf`` in a new folder."""
    data = options.pop("data", None) or _small()
    layers = data.get("transformer_layer_config", data)["num_hidden_layers"]
    values = change(checkpoints.tensors(_small(num_hidden_layers=layers)))
    checkpoints.write_checkpoint(folder / "c", data=data, values=values, **options)
    checkpoints.write_target(folder / "target.gguf")
    return folder


def _small(**changes: Any) -> dict[str, Any]:
    """A config.json of one layer: half the time of two."""
    return checkpoints.config(
        **{"num_hidden_layers": 1, "layer_types": ["sliding_attention"], **changes}
    )


def _first(values: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in values.items() if "conv." not in n and "selector" not in n}


def _with_tables(values: Mapping[str, Any]) -> dict[str, Any]:
    table = values["candidate_selector.successor_codebook"]
    return {**values, "embed_tokens.weight": table, "lm_head.weight": table}


def _dflash1() -> dict[str, Any]:
    return _small(architectures=["DFlashDraftModel"], **{f"dflash__{key}": ... for key in _SECOND})


def _plain(folder: Path, *mutable: str) -> list[Case]:
    made = [
        _checkpoint(folder / "plain"),
        _checkpoint(folder / "first", data=_dflash1(), change=_first),
        _checkpoint(folder / "tables", change=_with_tables),
        _checkpoint(folder / "prefix", prefix="model.", dtype="F32"),
    ]
    return [_case(path, *mutable) for path in made]


def _safetensors(folder: Path) -> list[Case]:
    return _plain(folder, "c/model.safetensors")


def _config(folder: Path) -> list[Case]:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    rope = _small(rope_parameters={"rope_theta": 1e4, **yarn})
    swa = {"use_swa": True, "swa_window_size": 12, "output_multiplier": 2.0}
    more = checkpoints.config(**{f"dflash__{key}": value for key, value in swa.items()})
    made = [_checkpoint(folder / "rope", data=rope), _checkpoint(folder / "more", data=more)]
    return _plain(folder, "c/config.json") + [_case(path, "c/config.json") for path in made]


def _speculators(folder: Path) -> list[Case]:
    from tests.convert.test_variants import speculator

    made = [
        _checkpoint(folder / "second", data=speculator()),
        _checkpoint(folder / "first", data=speculator("dflash"), change=_first),
    ]
    return [_case(path, "c/config.json") for path in made]


def _index(folder: Path) -> list[Case]:
    made = [_checkpoint(folder / str(n), data=checkpoints.config(), shards=n) for n in (2, 3)]
    index = "c/model.safetensors.index.json"
    return [_case(made[0], index), _case(made[1], index), _case(made[1], "c/")]


def _quantized(folder: Path) -> list[Case]:
    import torch

    from tests.convert.stored_forms import FORMS, write_quantized
    from tests.convert.test_variants import reduced

    torch.manual_seed(0)
    cases = []
    for i, name in enumerate(FORMS):
        write_quantized(
            folder / str(i) / "c", name, num_hidden_layers=1, layer_types=["sliding_attention"]
        )
        checkpoints.write_target(folder / str(i) / "target.gguf")
        cases.append(_case(folder / str(i), "c/"))
    (folder / "reduced").mkdir()
    reduced(folder / "reduced" / "c", [1, 2, 3, *range(5, 22)])
    checkpoints.write_target(folder / "reduced" / "target.gguf")
    return [*cases, _case(folder / "reduced", "c/")]


def _mask_state() -> dict[str, Any]:
    import torch

    return {"mask_token_id": 3, "embedding": torch.linspace(-1, 1, 32)}


def _mask(folder: Path) -> list[Case]:
    import torch

    from tests.convert.test_mask_embedding import lender

    cases = []
    for tied in (True, False):
        path = _checkpoint(folder / str(tied))
        lender(path / "target.gguf", tied=tied)
        torch.save(_mask_state(), path / "c" / "mask_embedding.pt")
        cases.append(_case(path, "c/mask_embedding.pt", state=_mask_state))
        cases.append(_case(path, "target.gguf"))
    return [*cases[::2], *cases]


@cache
def _torch_state() -> dict[str, Any]:
    import torch

    values = checkpoints.tensors(_small())
    return {name: torch.tensor(value).bfloat16() for name, value in values.items()}


def _torch(folder: Path) -> list[Case]:
    import torch

    path = _checkpoint(folder / "torch")
    (path / "c" / "model.safetensors").unlink()
    torch.save(_torch_state(), path / "c" / "pytorch_model.bin")
    return [_case(path, "c/pytorch_model.bin", state=_torch_state)]


def _tokenizer(folder: Path) -> list[Case]:
    from tests.convert.test_target import GPT4O, LLAMA3, QWEN2, split, write_folder

    cases = []
    for i, pre in enumerate((None, split(QWEN2), split(LLAMA3), split(GPT4O))):
        path = _checkpoint(folder / str(i))
        (path / "target.gguf").unlink()
        write_folder(path / "t", pre=pre, model_type="gpt2" if pre is None else "llama")
        cases.append(_case(path, "t/", target="t"))
    return cases


def _targets(folder: Path) -> list[Case]:
    cases = []
    for name, options in {
        "plain": {},
        "nextn": {"nextn": 1, "arch": "glm4"},
        "sections": {"sections": [2, 1, 1, 0], "mask": 3},
    }.items():
        path = _checkpoint(folder / name)
        checkpoints.write_target(path / "target.gguf", **options)
        cases.append(_case(path, "target.gguf"))
    return cases


def _good(folder: Path) -> Path:
    """A pair with what the converter writes for it."""
    path = _checkpoint(folder, data=checkpoints.config())
    old_files.converted(path / "c", path / "target.gguf", path / "d.gguf")
    return path


def _source(folder: Path) -> list[Case]:
    path = _good(folder / "plain")
    small = _checkpoint(folder / "small", data=_dflash1(), change=_first)
    old_files.converted(small / "c", small / "target.gguf", small / "d.gguf", "q8_0")
    return [_case(path, "d.gguf"), _case(small, "d.gguf")]


def _check(folder: Path) -> list[Case]:
    pairs.write_right_target(folder / "target.gguf")
    pairs.write_right_drafter(folder / "d.gguf")
    return [_case(folder, "target.gguf"), _case(folder, "d.gguf"), _case(folder, "target", "d.")]


def _migrate(folder: Path) -> list[Case]:
    good = _good(folder / "good")
    cases = []
    for i, kind in enumerate(old_files.KINDS.values()):
        path = _checkpoint(folder / str(i))
        old_files.write_old(good / "d.gguf", path / "d.gguf", kind)
        changed = ("d.gguf", "c/config.json") if "config" in kind.needs else ("d.gguf",)
        cases += [_case(path, "d.gguf", needs=kind.needs), _case(path, *changed, needs=kind.needs)]
    return cases


def _imatrix(folder: Path) -> list[Case]:
    import gguf
    import numpy as np

    from tests.convert.test_imatrix import write_imatrix

    path = _good(folder / "pair")
    entries = [
        (tensor.name, np.arange(tensor.shape[0], dtype=np.float32), 4.0)
        for tensor in gguf.GGUFReader(path / "d.gguf").tensors
        if len(tensor.shape) == 2
    ]
    write_imatrix(path / "m.gguf", *entries)
    return [_case(path, "m.gguf", imatrix="m.gguf")]


# --- what is done with them


@cache
def _preset(name: str) -> Any:
    return load_preset(name)


def _ignore(_count: int) -> None:
    """Nobody watches the progress."""


def _inspect(inputs: Path, _outputs: Path, *, name: str) -> None:
    inspection = inspect(inputs / name)
    render(inspection.facts)
    json.dumps({**inspection.facts, "problems": list(inspection.problems)})


def _facts(inputs: Path, _outputs: Path, *, target: str, draft: str) -> None:
    for fact in find_facts(inputs / target, inputs / draft):
        json.dumps(fact.as_dict())


def _convert(
    inputs: Path,
    outputs: Path,
    *,
    source: str,
    target: str | None,
    preset: str,
    imatrix: str | None,
    dry: bool,
) -> Path | None:
    """As ``dflash2-convert convert`` does, or only what it plans."""
    plan = make_plan(
        inputs / source,
        inputs / target if target else None,
        [(_preset(preset), outputs / OUTPUT)],
        imatrix=inputs / imatrix if imatrix else None,
    )
    for output in plan.outputs:
        output.fallbacks(plan.tensors)
    check_outputs(plan, force=False)
    if dry:
        return None
    run(plan, force=False, progress=_ignore)
    return outputs / OUTPUT


def _rewrite(
    inputs: Path, outputs: Path, *, target: str | None, config: str | None, layer_ids: str | None
) -> Path | None:
    """As ``dflash2-convert migrate`` does."""
    migration = plan_migration(
        inputs / "d.gguf",
        target=inputs / target if target else None,
        config=inputs / config if config else None,
        layer_ids=layer_ids,
    )
    for change in migration.changes:
        str(change)
    if not migration.changes:
        return None
    write_migrated(migration, outputs / OUTPUT, force=False, progress=_ignore)
    return outputs / OUTPUT


def _convert_steps(rng: Random, case: Case, source: str = "c") -> list[Step]:
    target = None if source.endswith(".gguf") else case.options.get("target", "target.gguf")
    convert = partial(
        _convert,
        source=source,
        target=target,
        preset=rng.choice(_PRESETS),
        imatrix=case.options.get("imatrix"),
        dry=rng.random() < 0.75,
    )
    steps: list[Step] = [convert]
    if rng.random() < 0.2:
        steps.insert(0, partial(_inspect, name=source))
    if rng.random() < 0.08:
        given = case.options.get("target", "target.gguf")
        steps.insert(0, partial(_facts, target=given, draft=source))
    return steps


def _source_steps(rng: Random, case: Case) -> list[Step]:
    return _convert_steps(rng, case, "d.gguf")


def _check_steps(_rng: Random, _case: Case) -> list[Step]:
    return [partial(_facts, target="target.gguf", draft="d.gguf")]


def _migrate_steps(rng: Random, case: Case) -> list[Step]:
    needs = case.options["needs"]
    # what it needs most often, and what it does not sometimes
    target = any("target" in need for need in needs) != (rng.random() < 0.2)
    config = ("config" in needs) != (rng.random() < 0.2)
    ids = rng.choice((None, None, None, None, "inputs", "outputs"))
    rewrite = partial(
        _rewrite,
        target="target.gguf" if target else None,
        config="c/config.json" if config else None,
        layer_ids=ids,
    )
    inspected = [partial(_inspect, name="d.gguf")] if rng.random() < 0.3 else []
    return [*inspected, rewrite]


KINDS: dict[str, Kind] = {
    "safetensors": Kind(cases=_safetensors, steps=_convert_steps),
    "index": Kind(cases=_index, steps=_convert_steps),
    "config": Kind(cases=_config, steps=_convert_steps),
    "speculators": Kind(cases=_speculators, steps=_convert_steps),
    "quantized": Kind(cases=_quantized, steps=_convert_steps),
    "mask": Kind(cases=_mask, steps=_convert_steps, share=1),
    "torch": Kind(cases=_torch, steps=_convert_steps, share=1),
    "tokenizer": Kind(cases=_tokenizer, steps=_convert_steps),
    "target": Kind(cases=_targets, steps=_convert_steps),
    "source": Kind(cases=_source, steps=_source_steps, share=3),
    "check": Kind(cases=_check, steps=_check_steps, share=3),
    "migrate": Kind(cases=_migrate, steps=_migrate_steps),
    "imatrix": Kind(cases=_imatrix, steps=_convert_steps, share=1),
}
