// Products of matrices in slots, and their portable reference.

#include "kernels/slots.h"

#include <algorithm>

#include "kernels/vector.h"

namespace umbra {

SlotMatrix SlotMatrix::moved(int64_t address) const {
    const auto move = [&](const uint8_t* plane) {
        return reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(plane) + static_cast<uintptr_t>(address));
    };
    SlotMatrix one = *this;
    one.data = move(data);
    if (scales) one.scales = move(scales);
    if (offsets) one.offsets = move(offsets);
    if (bias) one.bias = move(bias);
    return one;
}

namespace {

float number_at(const uint8_t* at, Type type, int64_t i) {
    if (type == Type::f32) return reinterpret_cast<const float*>(at)[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(at)[i];
    return type == Type::bf16 ? bf16_to_float(bits) : half_to_float(bits);
}

int nibble(const uint8_t* at, int64_t i) { return ((at[i / 2] >> i % 2 * 4 & 15) ^ 8) - 8; }

template <class Level, class Scaled>
void lines_generic(const SlotWindow& window, Level&& level, Scaled&& scaled) {
    const SlotMatrix& w = window.w;
    const int64_t blocks = w.k / kBlock, of_slab = w.slab() / kBlock;
    for (int t = 0; t < window.count; t++) {
        const Block* x = window.rows.blocks + (window.index ? window.index[t] : t) * blocks;
        for (int64_t o = window.first; o < window.end; o++) {
            float all = 0;
            for (int64_t slab = window.begin; slab < window.stop; slab++) {
                float sum = 0;
                for (int64_t b = slab * of_slab; b < std::min(blocks, (slab + 1) * of_slab); b++) {
                    int32_t dot = 0;
                    for (int i = 0; i < kBlock; i++) dot += level(b * kBlock + i, o) * x[b].q[i];
                    sum += scaled(b, o, dot, x[b].sum()) * x[b].scale;
                }
                all += sum;
            }
            window.y[t * window.stride + o - window.first] = all;
        }
    }
}

void nibbles_generic(const SlotWindow& window) {
    const SlotMatrix& w = window.w;
    lines_generic(
        window, [&](int64_t c, int64_t o) { return nibble(w.data, w.in_planes() ? w.lane(c, o) : c * w.n + o); },
        [&](int64_t b, int64_t o, int32_t dot, int32_t sum) {
            const int64_t group = b * kBlock / w.group;
            const int64_t at =
                w.in_planes() ? (group / w.groups * w.n + o) * w.kept() + group % w.groups : group * w.n + o;
            const float offset = w.offsets ? number_at(w.offsets, w.type, at) : 0;
            return number_at(w.scales, w.type, at) * (static_cast<float>(dot) + offset * static_cast<float>(sum));
        });
}

void levels_generic(const SlotWindow& window) {
    lines_generic(
        window, [&](int64_t c, int64_t o) { return static_cast<int8_t>(window.w.data[c * window.w.n + o]); },
        [&](int64_t, int64_t, int32_t dot, int32_t) { return static_cast<float>(dot); });
}

void floats_generic(const SlotWindow& window) {
    const SlotMatrix& w = window.w;
    for (int t = 0; t < window.count; t++)
        for (int64_t o = window.first; o < window.end; o++) {
            const float* x = window.rows.x + (window.index ? window.index[t] : t) * w.k;
            float sum = 0;
            for (int64_t c = 0; c < w.k; c++) sum += number_at(w.data, w.type, c * w.n + o) * x[c];
            window.y[t * window.stride + o - window.first] = sum;
        }
}

}  // namespace

const SlotKernels slots_generic{nibbles_generic, levels_generic, floats_generic, nibbles_generic};

int64_t SlotMatrix::lane(int64_t input, int64_t output) const {
    const int64_t of_group = input % group / unit, at = of_group / planes() * groups + input / group % groups;
    const int64_t plane = input / group / groups * planes() + of_group % planes();
    return (plane * n + output) * lanes + at * unit + input % unit;
}

int64_t SlotMatrix::slab() const { return quantised() && !in_planes() ? 512 : k; }

void slot_products(const SlotWindow& window) {
    const SlotMatrix& w = window.w;
    // Strips have up to 128 outputs, and kernels of planes read halves.
    const bool few = w.in_planes() ? w.type == Type::f32 : w.n < kSlotTile;
    const SlotKernels& slots = few ? slots_generic : *window.kernels.slots;
    (w.in_planes()          ? slots.planes
     : w.traits().nibbles() ? slots.nibbles
     : w.quantised()        ? slots.levels
                            : slots.floats)(window);
}

void finish_slots(const SlotMatrix& w, int64_t first, int64_t count, float* y) {
    if (w.traits().bytes())
        for (int64_t i = 0; i < count; i++) y[i] *= number_at(w.scales, w.type, first + i);
    if (w.bias)
        for (int64_t i = 0; i < count; i++) y[i] += number_at(w.bias, w.of_bias, first + i);
}

}  // namespace umbra
