// The ops of gated DeltaNet layers against plain loops, over two steps: from zeros, and then from each other's states.
#pragma once

#include "checks.h"
#include "kernels/ops.h"

namespace {

// A head's state decays by one number, or each of its rows by its own; `lowest` as in GatedDelta.
void check_delta(const umbra::Kernels& kernels, int64_t key_heads, int64_t heads, int64_t depth, int64_t width,
                 bool by_row = false, float lowest = 0.0f) {
    std::printf("delta rule, %d heads of %d by %d%s\n", int(heads), int(depth), int(width), by_row ? ", by rows" : "");
    const int64_t each = by_row ? depth : 1, decays = heads * each;
    constexpr int64_t kTaps = 4, kTokens = 9,
                      kRows = 5;  // of each of two steps of a sequence; before and after it, others
    const int64_t keys = key_heads * depth, channels = 2 * keys + heads * width, size = heads * depth * width;
    const int64_t slab = umbra::GatedDelta::slab(width), place = size + (kTaps - 1) * channels;
    std::vector<float> weight = random_floats(kTaps * channels), rates = random_floats(heads),
                       bias = random_floats(decays);
    for (float& rate : rates) rate = std::fabs(rate);
    std::vector<float> arena(4 * place), inputs((kTaps - 1) * channels), state(size);
    umbra::Pool pool(2);
    umbra::Context context{pool, kernels};
    const std::vector<int64_t> starts{0, 2, 2 + kRows, 2 + kRows + 1};
    const std::vector<int32_t> writes{0, 1, 2}, marks{0, kRows, 0}, marked{0, 3, 0}, pending(3);
    for (int step = 0; step < 2; step++) {
        const std::vector<int32_t> reads = step ? std::vector<int32_t>{2, 3, 0} : std::vector<int32_t>(3, -1);
        const std::vector<float> x = random_floats(kTokens * channels), a = random_floats(kTokens * decays),
                                 b = random_floats(kTokens * heads);
        std::vector<float> qkv(kTokens * channels), out(kTokens * heads * width),
            factors(kTokens * (channels + decays));
        std::vector<float> wanted_qkv(qkv), wanted(out);
        const umbra::Places places{
            starts.data(), reads.data(), writes.data(), marks.data(), marked.data(), pending.data(), 3};
        umbra::CausalConv{x.data(), weight.data(), arena.data() + size, places, qkv.data(), kTokens, channels, kTaps, 0,
                          channels, place}
            .run(context);
        const std::vector<float> convolved(qkv);
        umbra::GatedDelta{
            qkv.data(),     a.data(),   b.data(), rates.data(), bias.data(), arena.data(), nullptr, places,
            factors.data(), out.data(), kTokens,  key_heads,    heads,       depth,        width,   0,
            decays,         heads,      place,    decays,       lowest}
            .run(context);
        inputs.insert(inputs.end(), x.begin() + 2 * channels, x.begin() + (2 + kRows) * channels);
        for (int64_t t = 2; t < 2 + kRows; t++) {
            for (int64_t c = 0; c < channels; c++) {
                double sum = 0;
                for (int64_t j = 0; j < kTaps; j++)
                    sum += weight[j * channels + c] * inputs[(t - 2 + j) * channels + c];
                wanted_qkv[t * channels + c] = static_cast<float>(sum / (1 + std::exp(-sum)));
            }
            for (int64_t h = 0; h < heads; h++) {
                const float *q = &wanted_qkv[t * channels + h / (heads / key_heads) * depth], *k = q + keys;
                const float* v = &wanted_qkv[t * channels + 2 * keys + h * width];
                double qq = 1e-6, kk = 1e-6;
                for (int64_t i = 0; i < depth; i++) qq += q[i] * q[i], kk += k[i] * k[i];
                std::vector<double> decay(depth);
                for (int64_t i = 0; i < depth; i++) {
                    const int64_t of = h * each + i % each;
                    const double x = a[t * decays + of] + bias[of];
                    decay[i] = std::exp(lowest != 0.0f ? lowest / (1 + std::exp(-rates[h] * x))
                                                       : -rates[h] * std::log1p(std::exp(x)));
                }
                const double beta = 1 / (1 + std::exp(-b[t * heads + h]));
                for (int64_t j = 0; j < width; j++) {
                    float* s = &state[h * depth * width + j];
                    double held = 0, o = 0;
                    for (int64_t i = 0; i < depth; i++) held += decay[i] * s[i * width] * k[i] / std::sqrt(kk);
                    for (int64_t i = 0; i < depth; i++) {
                        s[i * width] =
                            static_cast<float>(decay[i] * s[i * width] + k[i] / std::sqrt(kk) * beta * (v[j] - held));
                        o += s[i * width] * q[i] / std::sqrt(qq * depth);
                    }
                    wanted[(t * heads + h) * width + j] = static_cast<float>(o);
                }
            }
        }
        const auto rows = [&](const std::vector<float>& of, int64_t each) {
            return std::vector<float>(of.begin() + 2 * each, of.begin() + (2 + kRows) * each);
        };
        close("the convolution", rows(convolved, channels), rows(wanted_qkv, channels), 2e-5f);
        close("outputs", rows(out, heads * width), rows(wanted, heads * width), 2e-5f);
        inputs.erase(inputs.begin(), inputs.begin() + kRows * channels);
        for (int64_t at : {1, 3}) {
            std::vector<float> found(size);
            for (int64_t i = 0; i < size; i++) {
                const int64_t h = i / (depth * width), row = i / width % depth, column = i % width;
                found[i] =
                    arena[at * place + h * depth * width + column / slab * slab * depth + row * slab + column % slab];
            }
            close("a state", found, state, 2e-5f);
            const auto kept = arena.begin() + at * place + size;
            same("inputs", std::vector<float>(kept, kept + (kTaps - 1) * channels), inputs);
        }
    }
}

}  // namespace
