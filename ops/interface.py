"""The ops that models are written in. A module with these functions is an implementation.

T: tokens of the step, all sequences packed one after another. S: sequences. Shapes are (rows, columns).
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from umbra.ops.formats import Format
from umbra.ops.formats.quantised import Quantised
from umbra.ops.sampling import Choice


def fixed(tensor: Tensor) -> nn.Parameter:
    """`tensor` as a Parameter without a gradient: captured graphs take Parameters by their address."""
    return nn.Parameter(tensor, requires_grad=False)


class Matrix(Protocol):
    """A weight matrix in an implementation's own layout."""

    rows: int
    columns: int
    nbytes: int
    storages: list[Tensor]  # all of its memory

    def fill(self, row: int, part: Tensor | Quantised) -> bool | None:
        """Writes `part` (m, columns) from `row` on. Quantised rows that fit the format are kept bit for bit. Returns
        whether all values are finite numbers; None: it did not look."""


@dataclass(frozen=True)
class ExpertKind:
    """The computation of experts: down(silu(gate(x)) * up(x)) or, with a `limit`, down((up + 1) * gate * sigmoid(alpha
    * gate)) of gates that are at most `limit` and ups between -limit and limit. `biased`: each matrix has a bias.
    `gelu`: down(gelu(gate(x)) * up(x)), as of `Ops.gelu_mul`."""

    limit: float = 0.0
    alpha: float = 0.0
    biased: bool = False
    gelu: bool = False


SILU_EXPERTS = ExpertKind()


class ExpertMatrices(Protocol):
    """The gate, up (inner, hidden) and down (hidden, inner) matrices of `count` experts, and their biases."""

    @property
    def count(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def storages(self) -> list[Tensor]: ...

    def fill(self, expert: int, which: str, part: Tensor | Quantised) -> bool | None:
        """Writes all of "gate", "up" or "down" of one expert. Returns what `Matrix.fill` returns."""

    def fill_bias(self, expert: int, which: str, part: Tensor) -> None:
        """Writes all of the bias of "gate", "up" or "down" of one expert."""


class HeadMatrices(Protocol):
    """A matrix (rows, columns) for each of `count` heads."""

    @property
    def nbytes(self) -> int: ...
    @property
    def storages(self) -> list[Tensor]: ...

    def fill(self, head: int, part: Tensor) -> bool | None:
        """Writes all of one head's. Returns what `Matrix.fill` returns."""


class MovableExperts(ExpertMatrices, Protocol):
    """Expert matrices that can be copied to another bank of the same sizes and format."""

    def stored(self, experts: Sequence[int]) -> Tensor:
        """Returns the stored bytes of `experts`. -> (experts, bytes) uint8, of its own memory"""

    def restore(self, experts: Sequence[int], stored: Tensor) -> None:
        """Writes what `stored` returned in the places of `experts`, which keep their addresses."""


Numbers: TypeAlias = "array[int]"  # int64 or int32, on the host


def tensor_of(numbers: Numbers) -> Tensor:
    """A tensor of `numbers` in the same memory. They cannot grow as long as it lives."""
    dtype = torch.int64 if numbers.typecode == "q" else torch.int32
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


# Lengths and offsets: a tensor that kernels read, or integers that the host passes with each launch.
Lengths = Tensor | tuple[int, ...]


class Paged(NamedTuple):
    """Paged attention's metadata: where the cache has the keys and values of a step's sequences, as `Ops.paging` makes
    it."""

    slot_mapping: Tensor  # the new tokens' slots: (T) page * page_size + offset in the page, or in another layout
    block_tables: Tensor  # (S, pages of the longest possible sequence): row s holds the pages of sequence s
    query_starts: Lengths  # (S + 1): sequence s has the new tokens query_starts[s] .. query_starts[s + 1] - 1,
    kv_lens: Lengths  # (S): which are the *last* of its kv_lens[s] cached tokens


class SequenceRows(NamedTuple):
    """The rows of a sequence in a step, with the fields of `Recurrent` as numbers."""

    start: int
    end: int
    read: int
    write: int
    mark: int
    marked: int
    pending: int

    @property
    def length(self) -> int:
        return self.end - self.start


class Recurrent(NamedTuple):
    """The places of the states of a step's sequences. Layers with states keep them in places of one tensor; the states
    of a place are one part of it each, and parts may share one memory: places may overlap, those in use may not.

    Rows of a sequence follow one another. A sequence without rows reads and writes nothing. Rows behind the last
    sequence's are padding, of which outputs are zeros. No sequence writes a place that another one reads or writes in
    the step, or marks one that it writes itself, or reads unless it writes none.

    Steps whose last rows may come to nothing, as drafts, write to no place and mark the last row that is certain: the
    marked place, which may be the one read, also keeps the inputs of the rows behind it, as many as it has room for.
    The next step takes those that came true, from the place that it reads, before its own first row."""

    query_starts: Tensor  # (S + 1) int64: sequence s has rows query_starts[s] .. query_starts[s + 1] - 1
    reads: Tensor  # (S) int32: the place with the state before the first row; negative: zeros
    writes: Tensor  # (S) int32: the place that gets the state after the last row, or the one it read; negative: none
    # (S) int32: the number of first rows, pending ones included, after which another place gets the state; 0: none
    marks: Tensor
    marked: Tensor  # (S) int32: that place
    pending: Tensor  # (S) int32: the number of rows that are taken before the first, of which inputs were kept

    def sequences(self) -> list[SequenceRows]:
        """Returns the sequences with at least one row, in batch order. It reads the tables, so a step on a device must
        have them on the host."""
        starts, *tables = (table.tolist() for table in self)
        rows = (SequenceRows(*row) for row in zip(starts[:-1], starts[1:], *tables, strict=True))
        return [row for row in rows if row.length]


class Groups(NamedTuple):
    """Experts in `number` groups of neighbours, of which `kept` have those that may be chosen: the groups with the
    largest sums of their `best` largest scores, of equal ones the first."""

    number: int
    kept: int
    best: int  # 1 or 2


class Heads(NamedTuple):
    """The norm and rotation of the heads of queries and keys, of D columns each."""

    kv_heads: int
    eps: float
    q_weight: Tensor  # (D), as of `Ops.rms_norm`
    k_weight: Tensor  # (D)
    cos: Tensor  # (T, D), as of `Ops.rope`
    sin: Tensor  # (T, D)


LatentCache = tuple[Tensor, ...]  # the parts of a layer's cache of latents, whose pages have the same numbers


@dataclass(frozen=True)
class SinkhornWeights:
    """The weights by which `count` = S residual streams are read and mixed, all float32."""

    count: int
    fn: Tensor  # ((2 + S) S, S H)
    scale: Tensor  # (3): of reading, writing and mixing
    base: Tensor  # ((2 + S) S)
    eps: float  # of the norm of all streams together, which has no weight
    margin: float  # added to weights and to sums that are divided by
    steps: int


class Pooling(NamedTuple):
    """The keys of blocks of `ratio` tokens: the mean of the tokens' keys of D columns, normalised, and rotated to the
    position of the block's first token."""

    ratio: int
    eps: float
    weight: Tensor  # (D), as of `Ops.rms_norm`
    cos: Tensor  # (T, D or more): the angles of each token, as of `Ops.norm_rotate`
    sin: Tensor
    back_cos: Tensor  # (D): the angles of `ratio` - 1 positions
    back_sin: Tensor


@dataclass(frozen=True)
class NgramTable:
    """A table of rows in parts of equally many, and the hashes that choose a row for each of several heads: those of
    the last two tokens first, as many of the last three, and so on, up to N."""

    multipliers: Tensor  # (N) int64
    moduli: Tensor  # (heads) int64
    offsets: Tensor  # (heads) int64
    end: int  # the token that ends a text, which stands for all tokens before it and before a sequence
    parts: list[Tensor]  # each (rows, width), on the host; they may lie in mapped files
    addresses: Tensor  # (parts) int64: where the parts begin


class LatentNorm(NamedTuple):
    """The norm of latents of N columns, and the rotation of queries and keys of R columns."""

    eps: float
    weight: Tensor  # (N), as of `Ops.rms_norm`
    cos: Tensor  # (T, R), as of `Ops.rope`
    sin: Tensor  # (T, R)


class PrologWeights(NamedTuple):
    """The weights of latents, and of queries that have latents of their own; all rows are in the checkpoint's order."""

    q_a: Matrix
    q_norm: Tensor  # its eps is that of the other norm
    q_b: Matrix
    kv_a: Matrix
    keys: HeadMatrices


# All that precedes attention over latents in the absorbed form, of rows (T, H): writes the cache at the slots given.
# -> queries of latents (T, heads, N), rotated queries (T, heads, R)
LatentProlog = Callable[[Tensor, PrologWeights, LatentNorm, LatentCache, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Scores:
    """A router's scores (T, E) of which the largest have not been chosen yet. `choose` returns weights and ids of given
    scores; `moe` takes scores in place of both, and is otherwise the op of that name."""

    values: Tensor
    choose: Callable[[Tensor], tuple[Tensor, Tensor]]
    moe: Callable[[Tensor, Tensor, ExpertMatrices, int | None], Tensor]


@dataclass(frozen=True)
class Rounded:
    """Rows that were rounded for the one matrix that they meet. `linear` is otherwise the op of that name."""

    linear: Callable[[Matrix, Tensor | None], Tensor]


Rows = Tensor | Rounded
# `Ops.add_rms_norm` whose rows may be rounded.
RoundingNorm = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], tuple[Rows, Tensor]]
# The experts of each token: weights (T, k) and ids (T, k), of types that `moe` takes, or scores.
Routed = tuple[Tensor, Tensor] | Scores


class Ops(Protocol):
    latent_parts: int  # the number of tensors of a cache of latents
    heads_in_q8: bool  # whether matrices of heads are kept in eight bits where linear layers are quantised
    selects: bool  # whether there are ops of attention over chosen blocks, and of tables on the host
    keys_in_pairs: bool  # whether `rope_write_latents` takes keys of which neighbouring columns rotate

    def vector_type(self, dtype: torch.dtype) -> torch.dtype:
        """The type of norm weights, biases and rotary angles used with matrices of `dtype`."""

    def paging(
        self, slot_mapping: Numbers, block_tables: Tensor, query_starts: Numbers, kv_lens: Numbers, page_size: int
    ) -> Paged:
        """These as `write_kv` and `attention` take them. Tensors are on the host, and may lie in the arguments' memory.
        A slot is page * page_size + offset in the page."""

    def embedding(self, ids: Tensor, table: Any, first_id: int | None) -> Tensor:
        """Rows of `table` (V, H) for `ids` (T) - `first_id`; zeros for ids outside the table. -> (T, H)
        With `first_id` None the table is complete and no id is outside. Where formats are mixed it may be a Matrix."""

    def matrix(self, rows: int, columns: int, format: Format, device: torch.device) -> Matrix:
        """Allocates a matrix; its content is undefined until filled."""

    def stack(self, parts: Sequence[tuple[int, Format]], columns: int, device: torch.device) -> Matrix:
        """Allocates a matrix with rows in several formats, (rows, format) of each run of rows, which are filled one run
        after another. Only for platforms that mix formats."""

    def expert_matrices(
        self, count: int, inner: int, hidden: int, format: Format, device: torch.device, kind: ExpertKind = SILU_EXPERTS
    ) -> MovableExperts:
        """Allocates the matrices of `count` experts."""

    def head_matrices(self, count: int, rows: int, columns: int, format: Format, device: torch.device) -> HeadMatrices:
        """Allocates the matrices of `count` heads."""

    def table(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates a table of which each token reads one row."""

    def fill_table(self, table: Tensor, part: Tensor | Quantised) -> bool | None:
        """Writes all of a table. Returns what `Matrix.fill` returns."""

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        """x (T, K) by weight (N, K) transposed, plus bias (N). -> (T, N), float32 if the weight is, else as x"""

    def head_linear(self, x: Tensor, weights: HeadMatrices) -> Tensor:
        """Each head of x (T, heads, K) by its own matrix (N, K) transposed. Tokens of x may lie further apart.
        -> (T, heads, N)"""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight + bias over the last dimension."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)"""

    def rounding_norm(self, reader: Matrix) -> RoundingNorm | None:
        """The norm of rows that only `reader` multiplies, if `linear` would round them and the norm can do so."""

    def split_rms_norm(
        self,
        parts: Sequence[Tensor],
        weights: Sequence[Tensor],
        counts: Sequence[int],
        eps: float,
        total: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """`rms_norm` of vectors that are split over ranks. parts[i] (T, N_i) and weights[i] (N_i) are this rank's parts
        of vector i; the parts of all ranks have counts[i] elements together. `total` sums a float32 tensor over the
        ranks, in place, and returns it; it is called once. -> parts of the normalised vectors"""

    def rope(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, of_queries: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate q and k (T, heads, D) by half-rotation; cos and sin (T, D), each angle repeated twice. `of_queries`:
        the cos and sin of q, if they are others."""

    def kv_cache(
        self, pages: int, page_size: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A zeroed cache for the keys or the values of one layer, in the implementation's own layout.
        int8: each head of each token has its own scale, max / 127."""

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Writes k, v (T, kv_heads, D) into the caches, in place, at the slots that `Paged.slot_mapping` says."""

    def norm_rope_write(
        self, qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, out: Tensor | None
    ) -> Tensor:
        """qkv (T, (query heads + 2 kv_heads) D) holds queries, keys and values side by side. Each head of queries and
        keys is normalised by `rms_norm` with its weight and rotated by `rope`; keys and values are written by
        `write_kv`. -> queries (T, query heads, D), which an implementation may place in `out` (T, query heads * D)"""

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        paged: Paged,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of packed queries over paged keys and values.

        q (T, heads, D); query heads share KV heads in equal, consecutive groups. With `window`, a query sees the last
        `window` keys up to its own; pages without any are not read. sinks (heads): a further score of every query, not
        scaled, of a key whose value is zero. -> (T, heads, D)
        """

    def latent_cache(
        self, part: int, pages: int, page_size: int, width: int, rotary: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A zeroed part of a layer's cache for latents of `width` and rotated keys of `rotary` columns, in the
        implementation's own layout. int8: each token has its own scale, max / 127."""

    def write_latents(self, latents: Tensor, keys: Tensor, cache: LatentCache, slot_mapping: Tensor) -> None:
        """Writes latents (T, N) and keys (T, R) into the cache, as `write_kv`. Rows may lie further apart."""

    def rope_write_latents(
        self, q: Tensor, rows: Tensor, norm: LatentNorm, cache: LatentCache, slot_mapping: Tensor
    ) -> Tensor:
        """rows (T, N + R) hold latents and keys side by side, and may lie further apart. Latents are normalised by
        `rms_norm`, keys and q (T, heads, R) rotated by `rope`; latents and keys are written by `write_latents`.
        -> q, rotated"""

    def latent_prolog(self, hidden: int, rank: int, heads: int, key: int, format: Format) -> LatentProlog | None:
        """One op of all that precedes attention over latents, if there is such a one for hidden states and queries'
        latents of so many columns, heads with keys of `key`, and matrices of `format`."""

    def latent_attention(self, q: Tensor, q_rotary: Tensor, cache: LatentCache, paged: Paged, scale: float) -> Tensor:
        """Causal attention of packed queries over paged latents, which all heads share: a token's key is its latent
        with its rotated key, and its value is the latent. q (T, heads, N), q_rotary (T, heads, R). -> (T, heads, N)"""

    def expanded_attention(
        self,
        q: Tensor,
        q_rotary: Tensor,
        cache: LatentCache,
        keys: HeadMatrices,
        values: HeadMatrices,
        paged: Paged,
        scale: float,
    ) -> Tensor:
        """Causal attention of packed queries over keys and values that are products of paged latents: a head's key of a
        token is its latent (N) by the head's matrix of `keys` (N, K), beside the rotated key, and its value the latent
        by the transpose of that of `values` (V, N). q (T, heads, K), of which tokens may lie further apart, q_rotary
        (T, heads, R). -> (T, heads, V)"""

    def silu_mul(self, x: Tensor) -> Tensor:
        """x (T, 2 N) holds gate and up side by side: silu(gate) * up. -> (T, N)"""

    def gelu_mul(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        """x (T, 2 N) holds gate and up side by side: gelu(gate) * up, of GELU's approximation by tanh. With `up`
        (T, N), whose tokens may lie further apart, x (T, N) is the gate. -> (T, N)"""

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap), in place of x (T, N). -> x"""

    def scale_by(self, x: Tensor, factor: Tensor) -> Tensor:
        """x * factor (1), in place of x (T, N). -> x"""

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        """x + sigmoid(gate) * y, in place of x (T, H). gate (T, 1); None: y (T, H) is added whole. -> x"""

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), in place of x (T, N). Rows of gate (T, N) may lie further apart. -> x"""

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
        """rms_norm(x) * silu(gate) of heads, or with `sigmoid` times that of the gate: x, gate (T, heads, D), weight
        (D). Tokens of `gate` may lie further apart. -> (T, heads, D)"""

    def causal_conv(self, x: Tensor, weight: Tensor, states: Tensor, recurrent: Recurrent) -> Tensor:
        """silu of a convolution of each channel over a sequence's rows, that is of the sum over j of
        weight[j] * x[row - K + 1 + j]. Rows of x (T, C) may lie further apart; weight (K, C) float32. A state is the
        last K - 1 rows of x, the oldest first, and behind them the rows that are kept: states (places, K - 1 + rows,
        C) float32, places at any distance. -> (T, C)"""

    def gated_delta_rule(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        rates: Tensor,
        dt_bias: Tensor,
        states: Tensor,
        inputs: Tensor,
        recurrent: Recurrent,
        lowest: float = 0.0,
    ) -> Tensor:
        """The gated delta rule (arXiv 2412.06464), in float32. Of each row and value head, with q and k divided by
        the root of their sum of squares plus 1e-6, q also by sqrt(Dk), and beta = sigmoid(b):

            S = S * exp(-rates * softplus(a + dt_bias));  S = S + k (beta (v - S^T k))^T;  out = S^T q

        With `lowest`, a negative number, S decays by exp(lowest * sigmoid(rates * (a + dt_bias))) instead. a (T, D) has
        a number of each head, D = Hv, or one of each row of its state, D = Hv Dk (arXiv 2510.26692).

        qkv (T, 2 Hk Dk + Hv Dv) holds queries, keys and values side by side; an implementation may overwrite it. Value
        heads share key heads in equal, consecutive groups. Rows of a, b (T, Hv) may lie further apart. rates (Hv) and
        dt_bias (D) float32. states (places, Hv, Dk, Dv) float32, places at any distance; within a head an
        implementation orders the elements in its own way. inputs (places, rows, Hk Dk + Hv Dv + D + Hv) float32, as
        far apart: those that are kept. -> (T, Hv, Dv)"""

    def row_cache(
        self, pages: int, rows: int, heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A zeroed cache (pages, heads, rows, width) for attention over chosen blocks of tokens: of keys, of values, or
        an index, of which a page has the keys of its tokens and behind them those of its blocks."""

    def norm_rotate(self, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """`rms_norm` of each head of x (T, heads, D), of which tokens may lie further apart, and then its rotation by
        half: cos and sin (T, D or more) have the angles of both halves in their first D / 2 columns."""

    def write_rows(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Writes k, v (T, kv_heads, D) as `write_kv`, into caches of rows."""

    def write_index(self, keys: Tensor, pooling: Pooling, cache: Tensor, slot_mapping: Tensor) -> None:
        """Writes keys (T, D) into an index, and then those of the blocks whose last tokens are among the new ones. Rows
        of keys may lie further apart."""

    def choose_blocks(
        self, q: Tensor, weights: Tensor | None, cache: Tensor, paged: Paged, ratio: int, top: int
    ) -> Tensor:
        """The `top` complete blocks before each query with the largest sums over heads of weight * relu(q . key), of
        equal ones the first; q (T, heads, D), weights (T, heads), or None: all are one.
        -> (T, top) int32, ascending; -1 behind them where there are fewer"""

    def selected_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, paged: Paged, blocks: Tensor, ratio: int, scale: float
    ) -> Tensor:
        """Attention as `attention`, over the tokens of the query's `blocks` (T, top) and those up to its own behind the
        last complete block. No other rows are read. -> (T, heads, D)"""

    def ngram_rows(self, token_ids: Tensor, previous: Tensor, table: NgramTable) -> Tensor:
        """The row of each head, (heads * width) side by side, for each of token_ids (T), before which lie the tokens
        `previous` (T, N - 1), the nearest first; -1: none. A row's number is its offset plus the hash modulo its
        modulus; the hash is the exclusive or of each token times its multiplier. -> (T, heads * width)"""

    def agreeing_values(self, keys: Tensor, queries: Tensor, values: Tensor, streams: int) -> Tensor:
        """values (T, H) in each stream, times sigmoid(sign(p) * sqrt(max(|p|, 1e-6))) with the product p of its key and
        its query, divided by sqrt(H); keys, queries (T, S * H). -> (T, S * H)"""

    def spread(self, x: Tensor, streams: int) -> Tensor:
        """x (T, H) in each of so many streams. -> (T, streams * H)"""

    def stream_norm(self, streams: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`rms_norm` of each stream alone: streams (T, S * H), weight (S, H). -> (T, S * H)"""

    def scaled_silu(self, x: Tensor, factor: float) -> Tensor:
        """silu(factor * x). Rows of x (T, N) may lie further apart. -> (T, N)"""

    def gated_read(self, gates: Tensor, normed: Tensor, streams: int) -> Tensor:
        """The mean over streams of sigmoid(gates) * normed, both (T, S * H). -> (T, H)"""

    def gated_write(self, streams: Tensor, y: Tensor, logits: Tensor) -> Tensor:
        """Adds 2 sigmoid(logits[s] / S) * y to each stream s, in place of streams (T, S * H); y (T, H). Rows of logits
        (T, S) may lie further apart. -> streams"""

    def sinkhorn_read(self, streams: Tensor, weights: SinkhornWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Reads streams (T, S * H) by weights that are computed from them (arXiv 2512.24880): with m the products of
        `fn` and the normalised streams, times `scale` plus `base`, the sum over s of (sigmoid(m_s) + margin) * stream
        s; weights of the result, 2 sigmoid(m); and a matrix of the streams' mixing, softmax(m) + margin over rows, of
        which columns, then rows and columns in turn, are divided by their sums plus `margin`, `steps` times.
        -> (T, H), post (T, S) and comb (T, S, S) in float32"""

    def sinkhorn_write(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Stream k becomes post[k] * y + the sum over j of comb[j, k] * stream j, in place of streams. -> streams"""

    def route_softmax(
        self,
        logits: Tensor,
        top_k: int,
        renormalise: bool,
        scale: float = 1.0,
        groups: Groups | None = None,
        factors: Tensor | None = None,
    ) -> Routed:
        """Softmax over all experts (T, E), then the top k, of equal ones those with smaller ids; weighted by `scale`
        too, and by the expert's own of `factors` (E) float32."""

    def route_sigmoid(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        renormalise: bool,
        scale: float = 1.0,
        groups: Groups | None = None,
    ) -> Routed:
        """The top k of sigmoid(logits) + bias (E), which are the scores of `groups` too, weighted by the sigmoid alone
        and then by `scale`; ties as in route_softmax."""

    def argmax(self, x: Tensor) -> Tensor:
        """The first of the largest of each row of x (S, V). -> (S) int64"""

    def sample(self, logits: Tensor, choices: Sequence[Choice]) -> Tensor:
        """The next token of each row of logits (S, V), chosen as choices[row] says. Where no token is left, as some
        grammars have it, it is any token. -> (S) int64"""

    def moe(self, x: Tensor, weights: Tensor, ids: Tensor, experts: ExpertMatrices, first_expert: int | None) -> Tensor:
        """Weighted sum of the routed experts that `experts` holds, which compute what their kind says, in float32.

        x (T, H); weights, ids (T, k). `experts` holds ids first_expert .. first_expert + count - 1; other ids, also
        negative ones, add nothing. With `first_expert` None it holds all experts and no id is outside. -> (T, H)
        """


@dataclass(frozen=True)
class PhysicalExperts:
    """The physical experts of all ranks, among which copies of a model's experts move between steps. Each rank has as
    many, and they are numbered in the order of the ranks. Both tensors keep their addresses."""

    table: Tensor  # (E) int32: the physical expert that this rank's rows of each expert go to
    rows: Tensor  # (physical experts here) int64: += 1 for each row that is exchanged and comes to one

    def of(self, ids: Tensor) -> Tensor:
        """Returns the physical experts (T, k) int32 that the rows of `ids` (T, k) go to."""
        return self.table.index_select(0, ids.flatten()).view(ids.shape)


class Exchange(Protocol):
    """Mixtures of experts that are divided over a group of ranks, expert by expert: rank r of n has experts
    r E / n .. (r + 1) E / n - 1 of E, or with `physical` its physical ones. Each rank's rows go to the ranks of their
    experts, and the results come back; a row's results are added in the order of its experts in `ids`."""

    uneven: bool  # whether ranks may have different numbers of rows

    def takes(self, rows: int, experts: ExpertMatrices) -> bool:
        """Returns whether `mixture` computes a step in which every rank of the group has `rows` rows. All ranks of the
        group get the same answer."""

    def mixture(
        self, x: Tensor, weights: Tensor, ids: Tensor, experts: ExpertMatrices, physical: PhysicalExperts | None = None
    ) -> Tensor:
        """Weighted sums over all experts of all ranks, as `Ops.moe` computes them, for this rank's rows. `experts` are
        those of this rank. All ranks of the group call it together, with as many rows unless these may be `uneven`."""
