"""The format contract: every GGUF key and tensor name this project writes or reads.

No other file spells one. Architecture ``dflash``, keys and tensors as upstream's
``conversion/qwen.py:DFlashModel`` writes them and ``src/models/dflash.cpp`` loads them. Shapes are
in numpy order (slowest dimension first); a GGUF file stores them reversed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from dflash2_gguf.ggml_types import GGMLType

__all__ = [
    "ALIGNMENT",
    "ARCHITECTURE",
    "FORMAT_REVISION",
    "IMATRIX_TYPE",
    "MAGIC",
    "QUANTIZATION_VERSION",
    "SUPPORTED_VERSIONS",
    "VERSION",
    "DraftShape",
    "Key",
    "Name",
    "Role",
    "TensorSpec",
    "arch_key",
    "draft_tensors",
    "tensor_name",
]

MAGIC: Final = b"GGUF"
VERSION: Final = 3
SUPPORTED_VERSIONS: Final = (2, 3)
ALIGNMENT: Final = 32
QUANTIZATION_VERSION: Final = 2
ARCHITECTURE: Final = "dflash"
IMATRIX_TYPE: Final = "imatrix"  # general.type of an importance matrix

# raised when the meaning of a file written by this project changes; upstream ignores the key
FORMAT_REVISION: Final = 1


def arch_key(field: str, *, arch: str = ARCHITECTURE) -> str:
    """Full key of a per-architecture field, such as ``dflash.block_count``."""
    return f"{arch}.{field}"


class Key:
    """Metadata keys. ``Key.Arch`` holds fields that follow an architecture, see arch_key."""

    ARCHITECTURE = "general.architecture"
    TYPE = "general.type"
    NAME = "general.name"
    SIZE_LABEL = "general.size_label"
    LICENSE = "general.license"
    LICENSE_NAME = "general.license.name"
    LICENSE_LINK = "general.license.link"
    SOURCE_REPO_URL = "general.source.repo_url"
    FILE_TYPE = "general.file_type"
    QUANTIZATION_VERSION = "general.quantization_version"
    ALIGNMENT = "general.alignment"

    SPLIT_NO = "split.no"
    SPLIT_COUNT = "split.count"
    IMATRIX_DATASETS = "imatrix.datasets"  # see upstream's common/imatrix-loader.cpp
    IMATRIX_CHUNK_COUNT = "imatrix.chunk_count"
    IMATRIX_CHUNK_SIZE = "imatrix.chunk_size"
    IMATRIX_TOKEN_COUNTS = "dflash2.token_counts"  # in an importance matrix, ignored by upstream
    QUANTIZE_IMATRIX_FILE = "quantize.imatrix.file"
    QUANTIZE_IMATRIX_DATASET = "quantize.imatrix.dataset"
    QUANTIZE_IMATRIX_ENTRIES = "quantize.imatrix.entries_count"
    QUANTIZE_IMATRIX_CHUNKS = "quantize.imatrix.chunks_count"

    TOKENIZER_PREFIX = "tokenizer."
    TOKENIZER_MODEL = "tokenizer.ggml.model"
    TOKENIZER_PRE = "tokenizer.ggml.pre"
    TOKENS = "tokenizer.ggml.tokens"
    TOKEN_TYPES = "tokenizer.ggml.token_type"
    MERGES = "tokenizer.ggml.merges"
    ADD_SPACE_PREFIX = "tokenizer.ggml.add_space_prefix"
    MASK_TOKEN_ID = "tokenizer.ggml.mask_token_id"
    CHAT_TEMPLATE = "tokenizer.chat_template"
    CHAT_TEMPLATES = "tokenizer.chat_templates"

    # special token kinds of a Hugging Face tokenizer -> keys
    SPECIAL_TOKEN_IDS: Final = {
        "bos": "tokenizer.ggml.bos_token_id",
        "eos": "tokenizer.ggml.eos_token_id",
        "eot": "tokenizer.ggml.eot_token_id",
        "eom": "tokenizer.ggml.eom_token_id",
        "unk": "tokenizer.ggml.unknown_token_id",
        "sep": "tokenizer.ggml.seperator_token_id",
        "pad": "tokenizer.ggml.padding_token_id",
        "mask": "tokenizer.ggml.mask_token_id",
    }
    ADD_SPECIAL: Final = {
        "bos": "tokenizer.ggml.add_bos_token",
        "eos": "tokenizer.ggml.add_eos_token",
        "sep": "tokenizer.ggml.add_sep_token",
    }

    # ours, ignored by upstream: where the file came from
    FORMAT = "dflash2.format"
    PRESET = "dflash2.preset"
    SOURCE_NAME = "dflash2.source.name"
    SOURCE_REVISION = "dflash2.source.revision"
    SOURCE_FILES = "dflash2.source.files"
    SOURCE_SHA256 = "dflash2.source.sha256"
    SOURCE_ROPE = "dflash2.source.rope_freq_base"
    SOURCE_QUANTIZATION = "dflash2.source.quantization"
    SOURCE_GGUF = "dflash2.source.gguf"
    SOURCE_GGUF_SHA256 = "dflash2.source.gguf_sha256"
    DRAFT_VOCAB_COUNTS = "dflash2.draft_vocab.counts"  # the file that rows were chosen by
    TARGET_NAME = "dflash2.target.name"
    TARGET_ARCHITECTURE = "dflash2.target.architecture"
    TARGET_BLOCK_COUNT = "dflash2.target.block_count"

    class Arch:
        """Fields that follow an architecture name."""

        BLOCK_COUNT = "block_count"
        NEXTN_LAYERS = "nextn_predict_layers"
        HYPER_CONNECTIONS = "hyper_connection.count"
        CONTEXT_LENGTH = "context_length"
        EMBEDDING_LENGTH = "embedding_length"
        EMBEDDING_LENGTH_OUT = "embedding_length_out"
        FEED_FORWARD_LENGTH = "feed_forward_length"
        HEAD_COUNT = "attention.head_count"
        HEAD_COUNT_KV = "attention.head_count_kv"
        KEY_LENGTH = "attention.key_length"
        VALUE_LENGTH = "attention.value_length"
        RMS_EPS = "attention.layer_norm_rms_epsilon"
        CAUSAL = "attention.causal"
        HIDDEN_ACTIVATION = "hidden_activation"
        SLIDING_WINDOW = "attention.sliding_window"
        SLIDING_WINDOW_PATTERN = "attention.sliding_window_pattern"
        VALUE_SCALE = "attention.value_scale"
        ROPE_FREQ_BASE = "rope.freq_base"
        ROPE_DIMENSION_COUNT = "rope.dimension_count"
        ROPE_DIMENSION_SECTIONS = "rope.dimension_sections"
        ROPE_SCALING_TYPE = "rope.scaling.type"
        ROPE_SCALING_FACTOR = "rope.scaling.factor"
        ROPE_SCALING_ORIG_CTX = "rope.scaling.original_context_length"
        YARN_EXT_FACTOR = "rope.scaling.yarn_ext_factor"
        YARN_ATTN_FACTOR = "rope.scaling.yarn_attn_factor"
        YARN_BETA_FAST = "rope.scaling.yarn_beta_fast"
        YARN_BETA_SLOW = "rope.scaling.yarn_beta_slow"
        BLOCK_SIZE = "block_size"
        CONV_KERNEL_SIZE = "conv_kernel_size"
        CONV_GROUP_SIZE = "conv_group_size"
        SELECTOR_RANK = "selector_rank"
        SELECTOR_TOP_K = "selector_top_k"
        TARGET_LAYERS = "target_layers"
        LOGIT_SCALE = "logit_scale"
        FINAL_LOGIT_SOFTCAPPING = "final_logit_softcapping"
        EMBEDDING_SCALE = "embedding_scale"


class Name:
    """Tensor names that are asked for one by one; all others follow from the shape of a drafter."""

    TOKEN_EMBD = "token_embd.weight"
    OUTPUT = "output.weight"
    SELECTOR_PREFIX = "selector_"
    MARKOV_PREFIX = "markov_"
    IMATRIX_SUMS = ".in_sum2"
    IMATRIX_COUNTS = ".counts"
    HF_EMBEDDINGS = "embed_tokens.weight"
    HF_HEAD = "lm_head.weight"
    HF_VOCAB_MAP = "d2t"
    HF_SINKS = "self_attn.sinks"
    HF_VALUES = "self_attn.v_proj.weight"
    HF_SELECTOR_PREFIX = "candidate_selector."


class Role(str, Enum):
    """What a tensor does in the drafter; presets choose types by role, never by name."""

    TOKEN_EMBD = "token_embd"
    OUTPUT = "output"
    VOCAB_MAP = "vocab_map"
    FC = "fc"
    SELECTOR_HIDDEN = "selector_hidden"
    SELECTOR_PREDECESSOR = "selector_predecessor"
    SELECTOR_SUCCESSOR = "selector_successor"
    NORM = "norm"
    ATTN_Q = "attn_q"
    ATTN_K = "attn_k"
    ATTN_V = "attn_v"
    ATTN_OUTPUT = "attn_output"
    ATTN_SINKS = "attn_sinks"
    FFN_GATE = "ffn_gate"
    FFN_UP = "ffn_up"
    FFN_DOWN = "ffn_down"
    CONV_BASE = "conv_base"
    ATTN_CONV_PROJ = "attn_conv_proj"
    FFN_CONV_PROJ = "ffn_conv_proj"

    @property
    def fixed_type(self) -> GGMLType | None:
        """The one type upstream's graph expects, whatever a recipe says; such tensors are tiny."""
        return _FIXED_TYPES.get(self)


_FIXED_TYPES: Final = {
    Role.NORM: GGMLType.F32,
    Role.CONV_BASE: GGMLType.F32,
    Role.ATTN_SINKS: GGMLType.F32,
    Role.VOCAB_MAP: GGMLType.I64,
}


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The numbers that fix every tensor shape of a drafter.

    A DFlash 1 drafter has neither convolutions nor a selector: their three numbers are 0.
    ``n_vocab_draft``: rows of a reduced head, with a map from them to token ids. ``shared_kv``:
    values are made of the keys' projection.
    """

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_tap: int
    conv_kernel: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    n_vocab_draft: int | None = None
    own_embeddings: bool = False
    own_head: bool = False
    sinks: bool = False
    shared_kv: bool = False

    @property
    def is_dflash2(self) -> bool:
        """With convolutions and selector."""
        return self.selector_rank > 0


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a drafter: its name here, its name in a checkpoint, its shape and role."""

    name: str
    hf_name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None

    @property
    def rope_rows(self) -> bool:
        """True where the head dimension is rotated: q, k and their norms."""
        return self.name.endswith(_ROTATED)


_ROTATED: Final = ("attn_q.weight", "attn_k.weight", "attn_q_norm.weight", "attn_k_norm.weight")

_GLOBAL: Final = {
    Name.HF_EMBEDDINGS: Name.TOKEN_EMBD,
    Name.HF_HEAD: Name.OUTPUT,
    Name.HF_VOCAB_MAP: "d2t",
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}

_LAYER: Final = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    Name.HF_VALUES: "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    Name.HF_SINKS: "attn_sinks.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}


def tensor_name(hf_name: str) -> str | None:
    """GGUF name of a checkpoint tensor (without ``model.`` prefix), None if it has none."""
    if hf_name in _GLOBAL:
        return _GLOBAL[hf_name]
    head, _, rest = hf_name.partition(".")
    layer, _, tail = rest.partition(".")
    if head != "layers" or not layer.isdecimal() or tail not in _LAYER:
        return None
    return f"blk.{int(layer)}.{_LAYER[tail]}"


def _global(hf_name: str, role: Role, *shape: int) -> TensorSpec:
    return TensorSpec(name=_GLOBAL[hf_name], hf_name=hf_name, shape=shape, role=role)


def _global_tensors(s: DraftShape) -> list[TensorSpec]:
    own = []
    if s.own_embeddings:
        # without a head of its own the drafter uses its embeddings as head
        role = Role.TOKEN_EMBD if s.own_head else Role.OUTPUT
        own.append(_global(Name.HF_EMBEDDINGS, role, s.n_vocab, s.n_embd))
    if s.own_head:
        own.append(_global(Name.HF_HEAD, Role.OUTPUT, s.n_vocab_draft or s.n_vocab, s.n_embd))
    if s.n_vocab_draft:
        own.append(_global(Name.HF_VOCAB_MAP, Role.VOCAB_MAP, s.n_vocab_draft))
    return [
        *own,
        _global("fc.weight", Role.FC, s.n_embd, s.n_tap * s.n_embd),
        _global("hidden_norm.weight", Role.NORM, s.n_embd),
        _global("norm.weight", Role.NORM, s.n_embd),
        *(_selector_tensors(s) if s.is_dflash2 else ()),
    ]


def _selector_tensors(s: DraftShape) -> list[TensorSpec]:
    tables = (
        ("predecessor_codebook", Role.SELECTOR_PREDECESSOR),
        ("successor_codebook", Role.SELECTOR_SUCCESSOR),
    )
    projection = f"{Name.HF_SELECTOR_PREFIX}hidden_projection.weight"
    return [
        _global(projection, Role.SELECTOR_HIDDEN, s.selector_rank, s.n_embd),
        *(
            _global(f"{Name.HF_SELECTOR_PREFIX}{table}", role, s.n_vocab, s.selector_rank)
            for table, role in tables
        ),
    ]


def _layer_tensors(s: DraftShape, layer: int) -> list[TensorSpec]:
    q, kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    rows: list[tuple[str, Role, tuple[int, ...]]] = [
        ("input_layernorm.weight", Role.NORM, (s.n_embd,)),
        ("self_attn.q_proj.weight", Role.ATTN_Q, (q, s.n_embd)),
        ("self_attn.k_proj.weight", Role.ATTN_K, (kv, s.n_embd)),
        *([] if s.shared_kv else [(Name.HF_VALUES, Role.ATTN_V, (kv, s.n_embd))]),
        ("self_attn.o_proj.weight", Role.ATTN_OUTPUT, (s.n_embd, q)),
        ("self_attn.q_norm.weight", Role.NORM, (s.head_dim,)),
        ("self_attn.k_norm.weight", Role.NORM, (s.head_dim,)),
        *([(Name.HF_SINKS, Role.ATTN_SINKS, (s.n_head,))] if s.sinks else []),
        *_conv_rows(s, "attention_conv", Role.ATTN_CONV_PROJ),
        ("post_attention_layernorm.weight", Role.NORM, (s.n_embd,)),
        ("mlp.gate_proj.weight", Role.FFN_GATE, (s.n_ff, s.n_embd)),
        ("mlp.up_proj.weight", Role.FFN_UP, (s.n_ff, s.n_embd)),
        ("mlp.down_proj.weight", Role.FFN_DOWN, (s.n_embd, s.n_ff)),
        *_conv_rows(s, "mlp_conv", Role.FFN_CONV_PROJ),
    ]
    return [
        TensorSpec(
            name=f"blk.{layer}.{_LAYER[tail]}",
            hf_name=f"layers.{layer}.{tail}",
            shape=shape,
            role=role,
            layer=layer,
        )
        for tail, role, shape in rows
    ]


def _conv_rows(s: DraftShape, conv: str, role: Role) -> list[tuple[str, Role, tuple[int, ...]]]:
    if not s.is_dflash2:
        return []
    projected = 2 * s.conv_kernel * (s.n_embd // s.conv_group)
    return [
        (f"{conv}.base_kernel", Role.CONV_BASE, (2, s.conv_kernel, s.n_embd)),
        (f"{conv}.kernel_projection.weight", role, (projected, s.n_embd)),
    ]


def draft_tensors(shape: DraftShape) -> tuple[TensorSpec, ...]:
    """All tensors of a drafter of this shape, in file order: the globals, then layer by layer."""
    layers = [t for layer in range(shape.n_layer) for t in _layer_tensors(shape, layer)]
    return (*_global_tensors(shape), *layers)
