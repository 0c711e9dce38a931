#include "kernels/ngrams.h"

#include <algorithm>
#include <cmath>

#include "kernels/elementwise.h"
#include "kernels/vector.h"

namespace umbra {
namespace {

CLONES void agreeing(const float* key, const float* query, const float* value, float* out, int64_t hidden) {
    const float product = dot(key, query, hidden) / std::sqrt(static_cast<float>(hidden));
    const float root = std::sqrt(std::max(std::fabs(product), 1e-6f));
    const float gate = product > 0 ? root : product < 0 ? -root : 0.0f;
    const float weight = 1.0f / (1.0f + std::exp(-gate));
    for (int64_t i = 0; i < hidden; i++) out[i] = weight * value[i];
}

}  // namespace

void NgramRows::run(Context& context) const {
    with_type(type, [&](auto example) {
        using T = decltype(example);
        const int64_t per_size = heads / (size - 1);
        context.pool.each(static_cast<int>(tokens * heads), [&](int task, int) {
            const int64_t t = task / heads, head = task % heads, most = 2 + head / per_size;
            uint64_t hash = static_cast<uint64_t>(ids[t]) * static_cast<uint64_t>(multipliers[0]);
            bool ended = false;
            for (int64_t k = 1; k < most; k++) {
                const int64_t id = before[t * (size - 1) + k - 1];
                ended = ended || id < 0 || id == end;
                hash ^= static_cast<uint64_t>(ended ? end : id) * static_cast<uint64_t>(multipliers[k]);
            }
            const int64_t row = static_cast<int64_t>(hash % static_cast<uint64_t>(moduli[head])) + offsets[head];
            const T* from = reinterpret_cast<const T*>(parts[row / part_rows]) + row % part_rows * width;
            float* to = out + (t * heads + head) * width;
            for (int64_t i = 0; i < width; i++) to[i] = widen(from[i]);
        });
    });
}

void AgreeingValues::run(Context& context) const {
    for_rows(context, tokens * streams, hidden, [&](int64_t i) {
        agreeing(keys + i * hidden, queries + i * hidden, values + i / streams * hidden, out + i * hidden, hidden);
    });
}

}  // namespace umbra
