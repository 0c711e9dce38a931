// The ops of the CPU platform. Each is a struct of pointers and sizes with a `run`. Eager calls fill one and run it
// once; a tape keeps it and runs it at every replay. `run` allocates nothing: the struct brings its scratch memory.
//
// Activations are float32 everywhere. T: tokens; S: sequences.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/matrix.h"
#include "runtime/pool.h"

namespace umbra {

// Memory that an op may use while it runs.
struct Room {
    float* memory = nullptr;
    int64_t floats = 0;
};

struct Context {
    Pool& pool;
    const Kernels& kernels;
    Room room{};
};

enum class Type : int32_t { f32 = 0, bf16 = 1, f16 = 2, i8 = 3 };  // element type of a table or cache; i8: caches only

constexpr int kMostWidth = 512;   // of an attention head
constexpr int kMostLatent = 512;  // of a latent
constexpr int kMostRotary = 64;   // of the rotated columns beside it

// Memory for quantised copies of activation rows; `bytes` is the size needed for `rows` rows of k columns.
struct Scratch {
    uint8_t* memory = nullptr;
    static int64_t bytes(int64_t rows, int64_t k) {
        return rows * (k / kBlock) * static_cast<int64_t>(sizeof(Block)) + 64;
    }
    Rows split(const float* x) const;
};

struct Embedding {
    const int64_t* ids;
    const void* table;  // (vocabulary, hidden) of `type`
    float* out;         // (T, hidden)
    int64_t tokens, vocabulary, hidden, first_id;
    Type type;
    void run(Context&) const;
};

// The same from a quantised matrix, whose rows are dequantised.
struct EmbeddingOf {
    SplitMatrix table;  // (vocabulary, hidden)
    const int64_t* ids;
    float* out;
    int64_t tokens, vocabulary, hidden, first_id;
    void run(Context&) const;
};

struct RmsNorm {
    const float* x;         // (T, heads, width), tokens `stride` apart
    const float* residual;  // added first, or null
    const float* weight;    // (width)
    float* out;             // contiguous
    float* total;           // x + residual, or null
    int64_t tokens, heads, width, stride;
    float eps;
    const float* bias = nullptr;  // (width), added last
    void run(Context&) const;
};

struct GatedRmsNorm {
    const float* x;       // (T, heads, width)
    const float* gate;    // (T, heads, width), tokens `stride` apart
    const float* weight;  // (width)
    float* out;           // (T, heads, width)
    int64_t tokens, heads, width, stride;
    float eps;
    bool sigmoid;  // of the gate, in place of silu
    void run(Context&) const;
};

// The two halves of an RmsNorm whose rows are split over ranks; between them the ranks sum `squares`.
struct SquareSums {
    const float* x;  // (T, width), tokens `stride` apart
    float* squares;  // (T)
    int64_t tokens, width, stride;
    void run(Context&) const;
};

struct ScaleBySquares {
    const float* x;                        // (T, width), tokens `stride` apart
    const float* squares;                  // (T), of whole rows
    const float* weight;                   // (width)
    float* out;                            // contiguous
    int64_t tokens, width, stride, count;  // count: elements of a whole row
    float eps;
    void run(Context&) const;
};

struct Rope {
    const float* x;          // (T, heads, width), tokens `stride` apart
    const float *cos, *sin;  // (T, width)
    float* out;              // contiguous
    int64_t tokens, heads, width, stride;
    void run(Context&) const;
};

struct WriteKv {
    const float *k, *v;       // (T, heads, width), tokens k_stride and v_stride apart
    void *k_cache, *v_cache;  // (pages, heads) pieces, laid out as attention.h describes
    const int64_t* slots;     // (T) page places: page * page_size + offset in the page
    int64_t tokens, heads, width, page_size, k_stride, v_stride;
    Type type;
    void run(Context&) const;
};

struct WriteLatents {
    const float *latents, *keys;  // (T, width) and (T, rotary), tokens latent_stride and key_stride apart
    void* cache;                  // pages of rows (page_size, width + rotary), laid out as attention.h describes
    const int64_t* slots;         // (T) as of WriteKv
    int64_t tokens, width, rotary, page_size, latent_stride, key_stride;
    Type type;
    void run(Context&) const;
};

// With `rotary` columns keys and values are the rows of one cache: a key is a whole row, its value the first `width`
// columns. All heads share them; `kv_heads` is then the number of parts that heads are computed in.
struct Attention {
    const float* q;  // (T, heads, width)
    const void *k_cache, *v_cache;
    const int64_t *block_tables, *query_starts, *kv_lens;
    float* out;
    int64_t sequences, heads, kv_heads, width, page_size, most_pages, tokens;
    float scale;
    Type type;
    int64_t window = 0;            // most keys that a query sees, its own included; 0: all before it
    const float* sinks = nullptr;  // (heads): a further score of each query, of a key whose value is zero; or null
    int64_t rotary = 0;
    const float* q_rotary = nullptr;  // (T, heads, rotary)
    void run(Context&) const;

    // The first key that a query sees that sees those before `seen`.
    int64_t first_seen(int64_t seen) const { return window && seen > window ? seen - window : 0; }
    // What the sum of weights is divided by: `total` and the sink's weight, both relative to e^most.
    float whole(float total, float most, int64_t head) const;
    // The parts of heads that share latents: as few as have at most 32 heads each.
    static int64_t latent_parts(int64_t heads);
};

// Attention over latents, of which each head's keys and values are made.
struct ExpandedAttention {
    SplitMatrix keys, values;  // of each head one after another: (width, key) and (value, width)
    const float* q;            // (T, heads, key), tokens `q_stride` apart
    const float* q_rotary;     // (T, heads, rotary)
    const void* cache;         // as of WriteLatents
    const int64_t *block_tables, *query_starts, *kv_lens;
    float* out;       // (T, heads, value)
    float* peaks;     // (T, heads, 2): scratch
    uint8_t* memory;  // memory_bytes: scratch
    int64_t sequences, heads, width, rotary, key, value, page_size, most_pages, tokens, q_stride;
    float scale;
    Type type;
    void run(Context&) const;
    // Heads that are computed together: as many as `memory` has a few MB for.
    int64_t together(const Kernels&) const;
    int64_t memory_bytes(const Kernels&) const;
};

struct SiluMul {
    const float* x;  // (T, 2 width)
    float* out;      // (T, width)
    int64_t tokens, width;
    void run(Context&) const;
};

// gelu(gate) * up, of GELU's approximation by tanh.
struct GeluMul {
    const float* gate;  // (T, width), tokens `gate_stride` apart
    const float* up;    // (T, width), tokens `up_stride` apart
    float* out;         // (T, width)
    int64_t tokens, width, gate_stride, up_stride;
    void run(Context&) const;
};

// x = cap * tanh(x / cap).
struct Softcap {
    float* x;  // (count), in place
    int64_t count;
    float cap;
    void run(Context&) const;
};

struct ScaleBy {
    float* x;             // (count), in place
    const float* factor;  // (1)
    int64_t count;
    void run(Context&) const;
};

struct SigmoidMul {
    float* x;           // (T, width), in place
    const float* gate;  // (T, width), tokens `stride` apart
    int64_t tokens, width, stride;
    void run(Context&) const;
};

struct AddGated {
    float* x;           // (T, width), in place
    const float* y;     // (T, width)
    const float* gate;  // (T) or null: y is added whole
    int64_t tokens, width;
    void run(Context&) const;
};

// Where the sequences of a step have their states: `Recurrent` in ops/interface.py.
struct Places {
    const int64_t* starts;                                     // (S + 1)
    const int32_t *reads, *writes, *marks, *marked, *pending;  // (S)
    int64_t sequences;
    // Whether a sequence's rows behind its mark may come to nothing.
    bool drafting(int64_t sequence) const { return marks[sequence] && writes[sequence] < 0; }
};

struct CausalConv {
    const float* x;       // (T, channels), tokens `stride` apart
    const float* weight;  // (taps, channels)
    float* states;        // places of (taps - 1 + ahead, channels), `place` floats apart
    Places places;
    float* out;  // (T, channels)
    int64_t tokens, channels, taps, ahead, stride, place;
    void run(Context&) const;
    static constexpr int64_t kMostTaps = 16;
};

struct GatedDelta {
    float* qkv;                    // (T, 2 key_heads * depth + heads * width); queries and keys are normalised in place
    const float *a, *b;            // (T, decays) and (T, heads), tokens a_stride and b_stride apart
    const float *rates, *dt_bias;  // (heads) and (decays)
    float* states;                 // places of `heads` states in slabs, `place` floats apart
    float* inputs;                 // as far apart, (ahead, kept()): inputs of rows that may come to nothing
    Places places;
    float* factors;  // (T, key_heads + decays + heads): scratch
    float* out;      // (T, heads, width)
    int64_t tokens, key_heads, heads, depth, width, ahead, a_stride, b_stride, place;
    int64_t decays;  // heads, or heads * depth: one of each row of a state
    float lowest;    // of a decay's logarithm; 0: it has no bound
    void run(Context&) const;
    bool by_row() const { return decays > heads; }
    int64_t kept() const { return key_heads * depth + heads * width + decays + heads; }  // keys, values, decays, betas
    static int64_t slab(int64_t width) { return width % 32 ? 16 : 32; }                  // columns of one
};

struct Route {
    const float* logits;  // (T, experts)
    const float* bias;    // (experts) or null; added to the scores that select experts, not to the weights
    float* weights;       // (T, k)
    int64_t* ids;         // (T, k)
    float* scratch;       // (T, experts)
    int64_t tokens, experts, k;
    bool sigmoid, renormalise;  // scores are sigmoid or softmax
    float scale;                // of the weights
    // Experts are chosen of the `kept_groups` of `groups` with the largest sums of their `best` largest scores, 1 or 2.
    int64_t groups, kept_groups, best;
    const float* factors = nullptr;  // (experts) or null; each expert's weight is multiplied by its own
    static constexpr int64_t kMostGroups = 64;
    void run(Context&) const;
};

struct Argmax {
    const float* x;  // (rows, width)
    int64_t* out;    // (rows)
    int32_t* best;   // (rows, chunks): scratch
    int64_t rows, width;
    static constexpr int64_t kChunk = 1 << 13;
    static int64_t chunks(int64_t width) { return (width + kChunk - 1) / kChunk; }
    void run(Context&) const;
};

// How one token is chosen: `Choice` in ops/sampling.py, which says what the settings mean. Fields of eight bytes, as
// ops/cpu/ops.py packs them.
struct Choice {
    double temperature, top_p, min_p, presence, frequency, repetition;
    int64_t top_k;  // 0: all tokens
    int64_t seed;
    const int64_t* ids;
    int64_t prompt, position;
    const int64_t* biased;  // (biases) tokens
    const double* bias;     // (biases)
    int64_t biases;
    const uint8_t* allowed;  // bits, or null
    int64_t allowed_bytes;

    bool adjusts() const { return presence != 0 || frequency != 0 || repetition != 1 || biases || allowed; }
};

struct Sample {
    const float* logits;    // (rows, width)
    const Choice* choices;  // (rows)
    int64_t* out;           // (rows)
    float* scratch;         // (threads, scratch_floats)
    int64_t rows, width;
    static int64_t scratch_floats(int64_t width);
    void run(Context&) const;
};

struct Linear {
    SplitMatrix w;
    const float* x;     // (T, k)
    const float* bias;  // (n), or null
    float* out;         // (T, n), n without padding rows
    Scratch scratch;
    int64_t tokens, n;
    int64_t stride = 0;  // from a row of `out` to the next; 0: n
    void run(Context&) const;
};

// Each head's product with its own matrix: w holds (n, k) of each head, one after another in each plane.
struct HeadLinear {
    SplitMatrix w;
    const float* x;    // (T, heads, k), tokens `stride` apart
    float* out;        // (T, heads, n)
    uint8_t* scratch;  // scratch_bytes
    int64_t tokens, heads, n, stride;
    static int64_t scratch_bytes(int64_t rows, int64_t k) { return Scratch::bytes(rows, k) + rows * k * 4 + 64; }
    void run(Context&) const;
};

// What an expert does between its matrices: silu(gate) * up, with a limit `clipped_swiglu`, or gelu(gate) * up.
struct Gating {
    float limit = 0, alpha = 0;  // limit 0: none
    bool gelu = false;
};

// Fused mixture of experts. w13 and w2 each hold `experts` matrices, one after another in each plane. The row blocks of
// w13 alternate between gate and up, so that a task of phase 1 reads one stream of memory.
// Two phases with one barrier between them. Phase 1, for each expert hit and each 32 rows of its intermediate size:
// gate and up products, their biases, `Gating`, and the quantisation of those 32 values, which are one activation block of
// phase 2. Phase 2, for each 16 rows of the output: the weighted products of all experts, added in order of expert, so
// that the result does not depend on which thread runs which task.
struct Moe {
    // The first expert's (2 * inner, hidden) and (hidden, inner), inner padded to a multiple of 32. Each node's part of
    // w13 has a multiple of 64 rows, so that the 32 values of one activation block are computed on one node.
    SplitMatrix w13, w2;
    const float* x;
    const float* weights;  // (T, k)
    const int64_t* ids;    // (T, k)
    float* out;            // (T, hidden)
    uint8_t* scratch;
    int64_t tokens, k, experts, first_expert, hidden, inner;
    Gating gating;
    const int64_t* address = nullptr;  // not null: experts lie as in MoeRows
    static int64_t scratch_bytes(int64_t tokens, int64_t k, int64_t experts, int64_t hidden, int64_t inner);
    void run(Context&) const;
};

struct SlotExperts;  // slots.h

// A mixture whose experts lie anywhere in memory, one block each, and are computed by different pools. It writes the
// unweighted product rows that Moe adds up, each to its own place, so that the sum (AddRows) does not depend on which
// pool computed which row. It computes the pairs (token, expert) whose expert has an address and is not `elsewhere`.
struct MoeRows {
    // As in Moe, for any one expert: the planes' addresses are offsets in its block.
    SplitMatrix w13, w2;
    const int64_t* address;    // (experts) addresses of the blocks, multiples of 64; 0: absent
    const int64_t* elsewhere;  // (experts) addresses of the experts another pool computes, 0 for others; or null
    const float* x;
    const int64_t* ids;  // (T, k)
    float* rows;         // (T * k, hidden)
    uint8_t* scratch;    // Moe::scratch_bytes; with `slots` twice `inner` floats more for each pair
    int64_t tokens, k, experts, first_expert, hidden, inner;
    Gating gating;
    std::shared_ptr<const SlotExperts> slots;  // experts in a device's layout, in place of w13 and w2

    // `run` in two steps. `sort` selects the pairs, returns whether there are any, and is the only step that reads
    // `ids` and `elsewhere`; `compute` computes their products.
    bool sort() const;
    void compute(Context&) const;
    void run(Context& context) const {
        if (sort()) compute(context);
    }
};

// Adds the weighted rows of all pairs in order of expert, then of position: bit for bit the result of Moe.
struct AddRows {
    const float* rows;
    const float* weights;  // (T, k)
    const int64_t* ids;    // (T, k); ids outside this rank's experts add nothing
    float* out;            // (T, hidden)
    int64_t tokens, k, experts, first_expert, hidden;
    void run(Context&) const;
};

}  // namespace umbra
