// Linear layers and the fused mixture of experts: how the products of matrix.h are cut into tasks.

#include <algorithm>
#include <cstring>

#include "ops.h"

namespace umbra {

void silu_mul(const float* gate, const float* up, float* out, int64_t width);  // elementwise.cpp

namespace {

constexpr int kTile = 64;  // activation rows that meet the same weights while both are in the second cache
constexpr int kNear = 4;   // row blocks of such weights
constexpr int kWide = kNear * kRows;

// Quantise rows 0 .. count - 1 into `to`, shared over the pool where there are many.
void quantise_rows(Context& context, int64_t count, int64_t k, const Rows& to) {
    const auto one = [&](int64_t i) {
        const Rows row = to.from(i, k);
        context.kernels.quantise(row.x, static_cast<int>(k / kBlock), const_cast<Block*>(row.blocks));
    };
    if (count < 4) {
        for (int64_t i = 0; i < count; i++) one(i);
    } else {
        context.pool.each(static_cast<int>(count), [&](int i, int) { one(i); });
    }
}

// Products of `blocks` neighbouring row blocks, 16 results each: y (count, kWide).
void products(const Kernels& kernels, const Matrix& w, int block, int blocks, const Rows& rows, const int32_t* index,
              int count, float* y) {
    const Product product = kernels.product[static_cast<int>(w.format)];
    for (int b = 0; b < blocks; b++) product(w, block + b, rows, index, count, y + b * kRows, kWide);
}

// f(first block, last block) for all blocks begin .. end - 1: many activation rows meet kNear blocks at a time, which then
// stay in the second cache; few take the blocks as one stream.
template <class F>
void for_near_blocks(int begin, int end, int64_t rows, F&& f) {
    const int near = rows > kTile ? kNear : end - begin;
    for (int block = begin; block < end; block += near) f(block, std::min(end, block + near));
}

// Ask for the first lines of a row block that will be read next: kernels prefetch within a block only, and the first
// lines of 500 short streams a layer would each cost the full latency of memory.
void prefetch_block(const Matrix& w, int block) {
    const uint8_t* at = w.quants + block * w.quant_stride();
    for (int i = 0; i < 4096; i += 64) __builtin_prefetch(at + i);
}

uint8_t* aligned(uint8_t* at) { return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + 63) & ~uintptr_t{63}); }

}  // namespace

Rows Scratch::split(const float* x) const { return {x, reinterpret_cast<const Block*>(aligned(memory))}; }

void Linear::run(Context& context) const {
    const int64_t k = w.like().k;
    const Rows rows = scratch.split(x);
    if (w.like().quantised()) quantise_rows(context, tokens, k, rows);
    context.pool.on_nodes([&](int node) { return w.blocks(node); }, [&](int node, int begin, int end, int) {
        const Matrix& part = w.parts[node];
        float y[kTile * kWide];
        const auto tile = [&](int first_block, int last_block, int64_t start, int count) {
            for (int block = first_block; block < last_block; block += kNear) {
                const int blocks = std::min(kNear, last_block - block);
                products(context.kernels, part, block, blocks, rows.from(start, k), nullptr, count, y);
                const int64_t first = static_cast<int64_t>(w.first[node] + block) * kRows;
                const int64_t width = std::min<int64_t>(blocks * kRows, n - first);
                for (int t = 0; t < count; t++)
                    for (int64_t r = 0; r < width; r++)
                        out[(start + t) * n + first + r] = y[t * kWide + r] + (bias ? bias[first + r] : 0.0f);
            }
        };
        for_near_blocks(begin, end, tokens, [&](int first_block, int last_block) {
            for (int64_t start = 0; start < tokens; start += kTile)
                tile(first_block, last_block, start, static_cast<int>(std::min<int64_t>(kTile, tokens - start)));
        });
    });
}

namespace {

// One run of a Moe: its scratch memory, its assignments (token, expert, weight) in order of expert, its two phases.
class MoeRun {
public:
    MoeRun(const Moe& moe, Context& context)
        : m_(moe), context_(context), groups_(moe.inner / kBlock) {
        // Scratch: quantised x | quantised h | h | token of each assignment | weight | start of each expert | experts hit
        const int64_t assignments = m_.tokens * m_.k;
        const Scratch x_scratch{m_.scratch}, h_scratch{m_.scratch + Scratch::bytes(m_.tokens, m_.hidden)};
        h_ = reinterpret_cast<float*>(aligned(h_scratch.memory + Scratch::bytes(assignments, m_.inner)));
        token_of_ = reinterpret_cast<int32_t*>(h_ + assignments * m_.inner);
        weight_of_ = reinterpret_cast<float*>(token_of_ + assignments);
        start_of_ = reinterpret_cast<int32_t*>(weight_of_ + assignments);
        hit_ = start_of_ + m_.experts + 1;
        xs_ = x_scratch.split(m_.x);
        hs_ = h_scratch.split(h_);
        sort(assignments);
    }

    void run() {
        if (m_.w13.like().quantised()) quantise_rows(context_, m_.tokens, m_.hidden, xs_);
        const auto groups = [&](int node) { return hits_ * (m_.w13.blocks(node) / kGroup); };
        context_.pool.on_nodes(groups, [&](int node, int begin, int end, int) { up(node, begin, end); });
        const auto blocks = [&](int node) { return m_.w2.blocks(node); };
        context_.pool.on_nodes(blocks, [&](int node, int begin, int end, int) {
            for_near_blocks(begin, end, m_.tokens, [&](int first, int last) { down(node, first, last); });
        });
    }

private:
    static constexpr int kGroup = kNear;  // blocks of w13: gate, up, gate, up: one stream, which makes 32 values of h

    // By expert, stably, so that a token's experts are added in order of expert.
    void sort(int64_t assignments) {
        std::fill(start_of_, start_of_ + m_.experts + 1, 0);
        const auto here = [&](int64_t a) { return m_.ids[a] - m_.first_expert; };
        for (int64_t a = 0; a < assignments; a++)
            if (here(a) >= 0 && here(a) < m_.experts) start_of_[here(a) + 1]++;
        for (int64_t e = 0; e < m_.experts; e++) {
            if (start_of_[e + 1]) hit_[hits_++] = static_cast<int32_t>(e);
            start_of_[e + 1] += start_of_[e];
        }
        for (int64_t a = 0; a < assignments; a++) {
            if (here(a) < 0 || here(a) >= m_.experts) continue;
            int32_t& next = start_of_[here(a)];
            token_of_[next] = static_cast<int32_t>(a / m_.k);
            weight_of_[next++] = m_.weights[a];
        }
        for (int64_t e = m_.experts; e > 0; e--) start_of_[e] = start_of_[e - 1];
        start_of_[0] = 0;
    }

    // f(first assignment, how many) for those of an expert, tile by tile
    template <class F>
    void for_assignments(int64_t e, F&& f) const {
        for (int start = start_of_[e]; start < start_of_[e + 1]; start += kTile)
            f(start, std::min(kTile, start_of_[e + 1] - start));
    }

    // Tasks begin .. end - 1 of a node: each 32 values of h of one expert that was hit.
    void up(int node, int begin, int end) {
        const int here = m_.w13.blocks(node) / kGroup;
        float y[kTile * kWide];  // gate, up, gate, up: 16 of each
        for (int task = begin; task < end; task++) {
            const int block = task % here * kGroup;
            const int64_t e = hit_[task / here], g = (m_.w13.first[node] + block) / kGroup;
            const Matrix w = m_.w13.parts[node].at(e);
            if (block + kGroup == m_.w13.blocks(node) && task + 1 < end)
                prefetch_block(m_.w13.parts[node].at(hit_[task / here + 1]), 0);
            for_assignments(e, [&](int start, int count) {
                products(context_.kernels, w, block, kGroup, xs_, token_of_ + start, count, y);
                for (int t = 0; t < count; t++) {
                    const int64_t row = start + t;
                    float* to = h_ + row * m_.inner + g * kBlock;
                    const float* both = y + t * kWide;
                    silu_mul(both, both + kRows, to, kRows);
                    silu_mul(both + 2 * kRows, both + 3 * kRows, to + kRows, kRows);
                    if (m_.w2.like().quantised())
                        context_.kernels.quantise(to, 1, const_cast<Block*>(hs_.blocks) + row * groups_ + g);
                }
            });
        }
    }

    // Row blocks begin .. end - 1 of a node's part of the output: all experts' products, weighted and added.
    void down(int node, int begin, int end) {
        const Matrix& part = m_.w2.parts[node];
        const auto column = [&](int block) { return static_cast<int64_t>(m_.w2.first[node] + block) * kRows; };
        const int64_t first = column(begin), width = std::min(column(end), m_.hidden) - first;
        for (int64_t t = 0; t < m_.tokens; t++) std::memset(m_.out + t * m_.hidden + first, 0, width * sizeof(float));
        float y[kTile * kWide];
        for (int i = 0; i < hits_; i++) {
            const Matrix w = part.at(hit_[i]);
            if (i + 1 < hits_) prefetch_block(part.at(hit_[i + 1]), begin);
            for_assignments(hit_[i], [&](int start, int count) {
                const Rows rows = hs_.from(start, m_.inner);
                for (int block = begin; block < end; block += kNear) {
                    const int blocks = std::min(kNear, end - block);
                    products(context_.kernels, w, block, blocks, rows, nullptr, count, y);
                    const int64_t kept = std::min<int64_t>(blocks * kRows, m_.hidden - column(block));
                    for (int t = 0; t < count; t++) {
                        float* to = m_.out + token_of_[start + t] * m_.hidden + column(block);
                        const float weight = weight_of_[start + t];
                        for (int64_t r = 0; r < kept; r++) to[r] += weight * y[t * kWide + r];
                    }
                }
            });
        }
    }

    const Moe& m_;
    Context& context_;
    const int64_t groups_;  // blocks of 32 in a row of h
    float* h_;              // (assignments, inner)
    int32_t *token_of_, *start_of_, *hit_;
    float* weight_of_;
    Rows xs_, hs_;
    int hits_ = 0;
};

}  // namespace

int64_t Moe::scratch_bytes(int64_t tokens, int64_t k, int64_t experts, int64_t hidden, int64_t inner) {
    const int64_t assignments = tokens * k;
    return Scratch::bytes(tokens, hidden) + Scratch::bytes(assignments, inner) + assignments * inner * 4 +
           assignments * 8 + (2 * experts + 1) * 4 + 256;
}

void Moe::run(Context& context) const { MoeRun(*this, context).run(); }

}  // namespace umbra
