// The mixture of experts, fused (Moe) or row by row (MoeRows). Both run the two phases of ops.h and differ only in
// where an expert's matrices lie and where its products go.

#include <algorithm>
#include <cstring>

#include "kernels/elementwise.h"
#include "kernels/products.h"
#include "kernels/slots.h"

namespace umbra {

namespace {

// to += weight * row. One function for Moe and AddRows, so that both round alike whether or not the compiler fuses
// multiplication and addition.
__attribute__((noinline)) void add_weighted(const float* row, float weight, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] += weight * row[i];
}

void add_bias(const float* bias, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] += bias[i];
}

// Where Moe and MoeRows differ. computes: whether expert e is to be computed; expert_of: its matrix in a part of w13 or
// w2; clear: runs before the first products for columns first .. first + width - 1; put: stores one pair's products.
bool computes(const Moe&, int64_t) { return true; }
Matrix expert_of(const Moe& m, const Matrix& part, int64_t e) {
    return m.address ? part.moved(m.address[e]) : part.at(e);
}
void clear(const Moe& m, int64_t first, int64_t width) {
    for (int64_t t = 0; t < m.tokens; t++) std::memset(m.out + t * m.hidden + first, 0, width * sizeof(float));
}
void put(const Moe& m, int64_t token, int64_t pair, int64_t column, const float* y, int64_t count) {
    add_weighted(y, m.weights[pair], m.out + token * m.hidden + column, count);
}

bool computes(const MoeRows& m, int64_t e) { return m.address[e] != 0 && !(m.elsewhere && m.elsewhere[e] != 0); }
Matrix expert_of(const MoeRows& m, const Matrix& part, int64_t e) { return part.moved(m.address[e]); }
void clear(const MoeRows&, int64_t, int64_t) {}
void put(const MoeRows& m, int64_t, int64_t pair, int64_t column, const float* y, int64_t count) {
    std::memcpy(m.rows + pair * m.hidden + column, y, count * sizeof(float));
}

// One run of an op: its scratch memory, its assignments (pairs of a token and an expert) by expert, and its two phases.
template <class Op>
class MoeRun {
public:
    explicit MoeRun(const Op& op) : m_(op), groups_(op.inner / kBlock) {
        // Scratch: quantised x | quantised h | h | token of each assignment | its pair | start of each expert |
        // number of experts hit | experts hit
        const int64_t assignments = m_.tokens * m_.k;
        const Scratch x_scratch{m_.scratch}, h_scratch{m_.scratch + Scratch::bytes(m_.tokens, m_.hidden)};
        h_ = reinterpret_cast<float*>(aligned(h_scratch.memory + Scratch::bytes(assignments, m_.inner)));
        token_of_ = reinterpret_cast<int32_t*>(h_ + assignments * m_.inner);
        pair_of_ = token_of_ + assignments;
        start_of_ = pair_of_ + assignments;
        hits_ = start_of_ + m_.experts + 1;
        hit_ = hits_ + 1;
        both_ = reinterpret_cast<float*>(aligned(reinterpret_cast<uint8_t*>(hit_ + m_.experts)));
        xs_ = x_scratch.split(m_.x);
        hs_ = h_scratch.split(h_);
    }

    // Sorts the assignments by expert, stably, so that a token's products are added in order of expert. Returns whether
    // there are any.
    bool sort() {
        const int64_t assignments = m_.tokens * m_.k;
        std::fill(start_of_, start_of_ + m_.experts + 1, 0);
        const auto here = [&](int64_t a) { return m_.ids[a] - m_.first_expert; };
        const auto mine = [&](int64_t e) { return e >= 0 && e < m_.experts && computes(m_, e); };
        for (int64_t a = 0; a < assignments; a++)
            if (mine(here(a))) start_of_[here(a) + 1]++;
        *hits_ = 0;
        for (int64_t e = 0; e < m_.experts; e++) {
            if (start_of_[e + 1]) hit_[(*hits_)++] = static_cast<int32_t>(e);
            start_of_[e + 1] += start_of_[e];
        }
        for (int64_t a = 0; a < assignments; a++) {
            if (!mine(here(a))) continue;
            int32_t& next = start_of_[here(a)];
            token_of_[next] = static_cast<int32_t>(a / m_.k);
            pair_of_[next++] = static_cast<int32_t>(a);
        }
        for (int64_t e = m_.experts; e > 0; e--) start_of_[e] = start_of_[e - 1];
        start_of_[0] = 0;
        return *hits_ != 0;
    }

    void phases(Context& context) {
        if (m_.w13.like().quantised()) quantise_rows(context, m_.tokens, m_.hidden, xs_);
        const auto groups = [&](int node) { return *hits_ * (m_.w13.blocks(node) / kGroup); };
        context.pool.on_nodes(groups, [&](int node, int begin, int end, int) { up(context, node, begin, end); });
        const auto blocks = [&](int node) { return m_.w2.blocks(node); };
        context.pool.on_nodes(blocks, [&](int node, int begin, int end, int) {
            for_near_blocks(begin, end, m_.tokens, [&](int first, int last) { down(context, node, first, last); });
        });
    }

    // The same of experts in slots, whose columns of gate and up may be far apart: all products first, then h.
    void slot_phases(Context& context, const SlotExperts& slots) {
        const SlotMatrix &w13 = slots.w13, &w2 = slots.w2;
        if (w13.quantised()) quantise_rows(context, m_.tokens, m_.hidden, xs_);
        const int64_t inner = m_.inner, wide = 2 * inner;
        slot_rows(
            context, w13,
            [&](int start, int count, int64_t first, int64_t width, const float* y) {
                for (int t = 0; t < count; t++)
                    std::copy_n(y + t * kSlotWindow, width, both_ + (start + t) * wide + first);
            },
            xs_, token_of_);
        each_row(context, start_of_[m_.experts], [&](int64_t a) {
            float *both = both_ + a * wide, *h = h_ + a * inner;
            if (slots.order.empty()) {
                gate(both, both + inner, h, inner);
            } else {
                for (int64_t i = 0; i < inner; i += kRows) gate(both + 2 * i, both + 2 * i + kRows, both + i, kRows);
                for (int64_t i = 0; i < inner; i++) h[slots.order[i]] = both[i];
            }
            if (!w2.quantised()) return;
            const Rows row = hs_.from(a, inner);
            context.kernels.quantise(row.x, static_cast<int>(groups_), const_cast<Block*>(row.blocks));
        });
        slot_rows(
            context, w2,
            [&](int start, int count, int64_t first, int64_t width, const float* y) {
                for (int t = 0; t < count; t++)
                    put(m_, token_of_[start + t], pair_of_[start + t], first, y + t * kSlotWindow, width);
            },
            hs_, nullptr);
    }

private:
    // Calls put(first assignment, count, first output, outputs, y) with the products of all experts' assignments, whose
    // rows have the numbers in `index`, or their own.
    template <class Put>
    void slot_rows(Context& context, const SlotMatrix& w, Put&& put, const Rows& rows, const int32_t* index) {
        if (w.slab() < w.k && start_of_[m_.experts] <= kMostInSlabs) return slab_rows(context, w, put, rows, index);
        const int64_t tiles = (w.n + kSlotTile - 1) / kSlotTile;
        Pool& pool = context.pool;
        const int all = static_cast<int>(*hits_ * tiles);
        const auto window = [&](int64_t task, int64_t end) {  // of one expert
            const auto of = [&](int64_t number) { return w.moved(m_.address[hit_[number / tiles]]); };
            const SlotMatrix own = of(task);
            const int64_t first = task % tiles * kSlotTile;
            const int64_t stop = std::min(w.n, first + (end - task) * kSlotTile);
            const uint8_t* next = end < all ? of(end).data : nullptr;
            if (next && end % tiles)
                next += end % tiles * kSlotTile * (w.in_planes() ? w.lanes * 4 : w.traits().bits) / 8;
            const int start_of = start_of_[hit_[task / tiles]], end_of = start_of_[hit_[task / tiles] + 1];
            for (int start = start_of; start < end_of; start += kSlotRows) {
                float y[kSlotRows * kSlotWindow];
                const int count = std::min(kSlotRows, end_of - start);
                const Rows from = index ? rows : rows.from(start, w.k);
                slot_products({context.kernels, own, first, stop, 0, w.slabs(), from, index ? index + start : nullptr,
                               count, y, kSlotWindow, next});
                for (int t = 0; t < count; t++) finish_slots(own, first, stop - first, y + t * kSlotWindow);
                put(start, count, first, stop - first, y);
            }
        };
        pool.on_nodes([&](int n) { return pool.first(all, n + 1) - pool.first(all, n); },
                      [&](int n, int begin, int end, int) {
                          const int64_t last = pool.first(all, n) + end;
                          for (int64_t task = pool.first(all, n) + begin, stop; task < last; task = stop) {
                              stop = std::min({last, (task / tiles + 1) * tiles, task + kSlotWindow / kSlotTile});
                              window(task, stop);
                          }
                      });
    }

    // The same for few assignments, in slabs of inputs.
    template <class Put>
    void slab_rows(Context& context, const SlotMatrix& w, Put&& put, const Rows& rows, const int32_t* index) {
        static thread_local std::vector<float> kept;  // [slab][assignment][output]
        const int64_t slabs = w.slabs(), step = start_of_[m_.experts] * w.n,
                      windows = (w.n + kSlotWindow - 1) / kSlotWindow;
        kept.resize(slabs * step);
        float* const sums = kept.data();
        context.pool.each(static_cast<int>(*hits_ * slabs), [&](int task, int) {
            const int64_t e = hit_[task / slabs], slab = task % slabs;
            const SlotMatrix own = w.moved(m_.address[e]);
            for (int start = start_of_[e], count; start < start_of_[e + 1]; start += count) {
                count = std::min(kSlotRows, start_of_[e + 1] - start);
                const Rows from = index ? rows : rows.from(start, w.k);
                const int64_t width = count <= kSlotFew ? kSlotWide : kSlotWindow;
                for (int64_t first = 0; first < w.n; first += width)
                    slot_products({context.kernels, own, first, std::min(w.n, first + width), slab, slab + 1, from,
                                   index ? index + start : nullptr, count, sums + slab * step + start * w.n + first,
                                   w.n, nullptr});
            }
        });
        context.pool.each(static_cast<int>(*hits_ * windows), [&](int task, int) {
            const int64_t e = hit_[task / windows], first = task % windows * kSlotWindow;
            const int64_t width = std::min(w.n - first, kSlotWindow);
            const SlotMatrix own = w.moved(m_.address[e]);
            for (int a = start_of_[e]; a < start_of_[e + 1]; a++) {
                float* const y = sums + a * w.n + first;
                for (int64_t slab = 1; slab < slabs; slab++)
                    for (int64_t i = 0; i < width; i++) y[i] += y[slab * step + i];
                finish_slots(own, first, width, y);
                put(a, 1, first, width, y);
            }
        });
    }

    static constexpr int kMostInSlabs = 64;  // assignments
    static constexpr int kGroup = kNear;  // blocks of w13 (gate, up, gate, up): one stream that yields 32 values of h

    // Calls f(first assignment, count) for the assignments of expert e, tile by tile.
    template <class F>
    void for_assignments(int64_t e, F&& f) const {
        for (int start = start_of_[e]; start < start_of_[e + 1]; start += kTile)
            f(start, std::min(kTile, start_of_[e + 1] - start));
    }

    // Phase 1, tasks begin .. end - 1 of a node; each computes 32 values of h of one expert that was hit.
    void up(Context& context, int node, int begin, int end) {
        const int here = m_.w13.blocks(node) / kGroup;
        float y[kTile * kWide];  // gate, up, gate, up: 16 of each
        for (int task = begin; task < end; task++) {
            const int block = task % here * kGroup;
            const int64_t e = hit_[task / here], g = (m_.w13.first[node] + block) / kGroup;
            const Matrix w = expert_of(m_, m_.w13.parts[node], e);
            if (block + kGroup == m_.w13.blocks(node) && task + 1 < end)
                prefetch_block(expert_of(m_, m_.w13.parts[node], hit_[task / here + 1]), 0);
            for_assignments(e, [&](int start, int count) {
                products(context.kernels, w, block, kGroup, xs_, token_of_ + start, count, y);
                for (int t = 0; t < count; t++) {
                    const int64_t row = start + t;
                    float* to = h_ + row * m_.inner + g * kBlock;
                    float* both = y + t * kWide;
                    if (w.bias) add_bias(w.bias + block * kRows, both, kWide);
                    gate(both, both + kRows, to, kRows);
                    gate(both + 2 * kRows, both + 3 * kRows, to + kRows, kRows);
                    if (m_.w2.like().quantised())
                        context.kernels.quantise(to, 1, const_cast<Block*>(hs_.blocks) + row * groups_ + g);
                }
            });
        }
    }

    void gate(const float* gates, const float* ups, float* to, int64_t count) const {
        const Gating& gating = m_.gating;
        if (gating.limit != 0)
            clipped_swiglu(gates, ups, gating.limit, gating.alpha, to, count);
        else if (gating.gelu)
            gelu_mul(gates, ups, to, count);
        else
            silu_mul(gates, ups, to, count);
    }

    // Phase 2, row blocks begin .. end - 1 of a node's part of the output: the products of all experts.
    void down(Context& context, int node, int begin, int end) {
        const Matrix& part = m_.w2.parts[node];
        const auto column = [&](int block) { return static_cast<int64_t>(m_.w2.first[node] + block) * kRows; };
        clear(m_, column(begin), std::min(column(end), m_.hidden) - column(begin));
        float y[kTile * kWide];
        for (int i = 0; i < *hits_; i++) {
            const Matrix w = expert_of(m_, part, hit_[i]);
            if (i + 1 < *hits_) prefetch_block(expert_of(m_, part, hit_[i + 1]), begin);
            for_assignments(hit_[i], [&](int start, int count) {
                const Rows rows = hs_.from(start, m_.inner);
                for (int block = begin; block < end; block += kNear) {
                    const int blocks = std::min(kNear, end - block);
                    products(context.kernels, w, block, blocks, rows, nullptr, count, y);
                    const int64_t kept = std::min<int64_t>(blocks * kRows, m_.hidden - column(block));
                    for (int t = 0; t < count && w.bias; t++) add_bias(w.bias + block * kRows, y + t * kWide, kept);
                    for (int t = 0; t < count; t++)
                        put(m_, token_of_[start + t], pair_of_[start + t], column(block), y + t * kWide, kept);
                }
            });
        }
    }

    const Op& m_;
    const int64_t groups_;  // blocks of 32 in a row of h
    float *h_, *both_;      // (assignments, inner), and twice as many of experts in slots
    int32_t *token_of_, *pair_of_, *start_of_, *hits_, *hit_;
    Rows xs_, hs_;
};

constexpr int64_t kChunk = 1024;  // columns of a task of AddRows

// The pair of `token` that is added after `pair`, or first after -1; -1: none is left.
int64_t next_pair(const AddRows& m, int64_t token, int64_t pair) {
    int64_t next = -1;
    for (int64_t other = token * m.k; other < (token + 1) * m.k; other++) {
        const int64_t id = m.ids[other], e = id - m.first_expert;
        const bool later = pair < 0 || id > m.ids[pair] || (id == m.ids[pair] && other > pair);
        if (e >= 0 && e < m.experts && later && (next < 0 || id < m.ids[next])) next = other;
    }
    return next;
}

}  // namespace

int64_t Moe::scratch_bytes(int64_t tokens, int64_t k, int64_t experts, int64_t hidden, int64_t inner) {
    const int64_t assignments = tokens * k;
    return Scratch::bytes(tokens, hidden) + Scratch::bytes(assignments, inner) + assignments * inner * 4 +
           assignments * 8 + (2 * experts + 2) * 4 + 256;
}

void Moe::run(Context& context) const {
    MoeRun<Moe> run(*this);
    run.sort();
    run.phases(context);
}

bool MoeRows::sort() const { return MoeRun<MoeRows>(*this).sort(); }

void MoeRows::compute(Context& context) const {
    MoeRun<MoeRows> run(*this);
    slots ? run.slot_phases(context, *slots) : run.phases(context);
}

void AddRows::run(Context& context) const {
    const int64_t chunks = (hidden + kChunk - 1) / kChunk;
    const auto one = [&](int64_t task) {
        const int64_t t = task / chunks, first = task % chunks * kChunk, count = std::min(kChunk, hidden - first);
        float* to = out + t * hidden + first;
        std::memset(to, 0, count * sizeof(float));
        for (int64_t pair = next_pair(*this, t, -1); pair >= 0; pair = next_pair(*this, t, pair))
            add_weighted(rows + pair * hidden + first, weights[pair], to, count);
    };
    if (tokens * k * hidden < kWorthSharing) {
        for (int64_t task = 0; task < tokens * chunks; task++) one(task);
    } else {
        context.pool.each(static_cast<int>(tokens * chunks), [&](int task, int) { one(task); });
    }
}

}  // namespace umbra
