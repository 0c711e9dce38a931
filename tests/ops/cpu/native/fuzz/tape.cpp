// Records sequences of ops of any sizes on values of any bits, and replays them: each replay must write what running
// the ops one by one wrote, and nothing beyond their outputs.

#include <functional>

#include "input.h"
#include "kernels/attention.h"
#include "runtime/tape.h"

using namespace umbra;

namespace {

struct Step {
    Input& input;
    Tape& tape;
    Context& context;
    std::vector<std::shared_ptr<std::vector<uint8_t>>> kept, outputs;
    std::vector<std::vector<uint8_t>> first;  // the outputs' bytes when the ops ran one by one

    template <class T>
    T* in(size_t count) {
        const std::vector<T> values = input.values<T>(count);
        kept.push_back(std::make_shared<std::vector<uint8_t>>(count * sizeof(T)));
        if (count) memcpy(kept.back()->data(), values.data(), count * sizeof(T));
        return reinterpret_cast<T*>(kept.back()->data());
    }
    template <class T>
    T* scratch(size_t count) {
        kept.push_back(std::make_shared<std::vector<uint8_t>>(count * sizeof(T)));
        return reinterpret_cast<T*>(kept.back()->data());
    }
    template <class T>
    T* out(size_t count) {
        T* at = scratch<T>(count);
        outputs.push_back(kept.back());
        return at;
    }
    int64_t* numbers(size_t count, int64_t least, int64_t most) {
        int64_t* at = scratch<int64_t>(count);
        for (size_t i = 0; i < count; i++) at[i] = input.range(least, most);
        return at;
    }
    template <class Op>
    void add(const Op& op) {
        tape.add(op);
        op.run(context);
    }

    SplitMatrix matrix(int64_t count, int64_t rows, int64_t k, int unit) {
        const Format format = static_cast<Format>(input.range(0, kFormats - 1));
        const int64_t group = traits_of(format).scales != Scales::none ? 32 : 0;
        std::vector<Matrix> parts;
        const Pool& pool = context.pool;
        const int units = static_cast<int>(rows / unit);
        for (int node = 0; node < pool.nodes(); node++) {
            Matrix w;
            w.format = format;
            w.n = (pool.first(units, node + 1) - pool.first(units, node)) * unit;
            w.k = static_cast<int32_t>(k);
            w.group = static_cast<int32_t>(group);
            const size_t blocks = count * w.n / kRows;
            w.quants = in<uint8_t>(blocks * w.quant_stride());
            if (group) w.scales = in<uint16_t>(blocks * w.scale_count());
            if (format == format_named("q4") && input.flag()) w.zeros = in<uint8_t>(blocks * w.scale_count());
            parts.push_back(w);
        }
        return SplitMatrix(parts);
    }

    void op() {
        const int64_t tokens = input.range<int64_t>(0, 9), width = input.range<int64_t>(1, 200);
        const int64_t heads = input.range<int64_t>(1, 4), stride = heads * width + input.range<int64_t>(0, 9);
        switch (input.range(0, 9)) {
            case 0: {
                const int64_t vocabulary = input.range<int64_t>(1, 9);
                const Type type = static_cast<Type>(input.range(0, 2));
                add(Embedding{in<int64_t>(tokens), in<uint8_t>(vocabulary * width * (type == Type::f32 ? 4 : 2)),
                              out<float>(tokens * width), tokens, vocabulary, width, input.range<int64_t>(0, 5), type});
                return;
            }
            case 1:
                add(RmsNorm{in<float>(tokens * stride), input.flag() ? in<float>(tokens * heads * width) : nullptr,
                            in<float>(width), out<float>(tokens * heads * width),
                            input.flag() ? out<float>(tokens * heads * width) : nullptr, tokens, heads, width, stride,
                            input.ConsumeFloatingPoint<float>()});
                return;
            case 2: {
                const float* x = in<float>(tokens * stride);
                float* squares = out<float>(tokens);
                add(SquareSums{x, squares, tokens, width, stride});
                add(ScaleBySquares{x, squares, in<float>(width), out<float>(tokens * width), tokens, width, stride,
                                   input.range<int64_t>(1, 9), 1e-6f});
                return;
            }
            case 3:
                add(Rope{in<float>(tokens * (stride + width)), in<float>(tokens * width * 2),
                         in<float>(tokens * width * 2), out<float>(tokens * heads * (width / 2 * 2)), tokens, heads,
                         width / 2 * 2, stride});
                return;
            case 4: {
                float* to = out<float>(tokens * width);
                add(SiluMul{in<float>(tokens * 2 * width), to, tokens, width});
                add(AddGated{to, in<float>(tokens * width), input.flag() ? in<float>(tokens) : nullptr, tokens, width});
                return;
            }
            case 5: {
                const int64_t experts = input.range<int64_t>(1, 20), k = input.range<int64_t>(1, experts);
                add(Route{in<float>(tokens * experts), input.flag() ? in<float>(experts) : nullptr,
                          out<float>(tokens * k), out<int64_t>(tokens * k), scratch<float>(tokens * experts), tokens,
                          experts, k, input.flag(), input.flag(), 1.0f});
                return;
            }
            case 6: {
                const int64_t columns = input.flag() ? width : input.range<int64_t>(1, 20000);
                add(Argmax{in<float>(tokens * columns), out<int64_t>(tokens),
                           scratch<int32_t>(tokens * Argmax::chunks(columns)), tokens, columns});
                return;
            }
            case 7: {
                const int64_t n = input.range<int64_t>(1, 90), k = input.range<int64_t>(1, 3) * 32;
                const SplitMatrix w = matrix(1, (n + 15) / 16 * 16, k, 16);
                add(Linear{w, in<float>(tokens * k), input.flag() ? in<float>(n) : nullptr, out<float>(tokens * n),
                           Scratch{scratch<uint8_t>(Scratch::bytes(tokens, k))}, tokens, n});
                return;
            }
            case 8: {
                const int64_t experts = input.range<int64_t>(1, 5), k = input.range<int64_t>(1, 4);
                const int64_t hidden = input.range<int64_t>(1, 3) * 32, inner = input.range<int64_t>(1, 3) * 32;
                const SplitMatrix w13 = matrix(experts, 2 * inner, hidden, 64), w2 = matrix(experts, hidden, inner, 16);
                // ids are any numbers: those outside this rank's experts are others'.
                add(Moe{w13, w2, in<float>(tokens * hidden), in<float>(tokens * k), in<int64_t>(tokens * k),
                        out<float>(tokens * hidden),
                        scratch<uint8_t>(Moe::scratch_bytes(tokens, k, experts, hidden, inner)), tokens, k, experts,
                        input.range<int64_t>(0, 4), hidden, inner});
                return;
            }
            default: attention();
        }
    }

    void attention() {
        const Type type = static_cast<Type>(input.range(0, 3));
        const int64_t width = 2 * input.range<int64_t>(1, 40), page = 2 * input.range<int64_t>(1, 9);
        const int64_t kv_heads = input.range<int64_t>(1, 2), heads = kv_heads * input.range<int64_t>(1, 3);
        const int64_t sequences = input.range<int64_t>(1, 3), pages = input.range<int64_t>(1, 6);
        std::vector<int64_t> starts{0};
        int64_t* lens = scratch<int64_t>(sequences);
        for (int64_t s = 0; s < sequences; s++) {
            lens[s] = input.range<int64_t>(1, pages * page);
            starts.push_back(starts.back() + input.range<int64_t>(1, lens[s]));
        }
        int64_t* query_starts = scratch<int64_t>(starts.size());
        std::copy(starts.begin(), starts.end(), query_starts);
        // Threads write the rows in any order, so that none has the place of another.
        const int64_t asking = starts.back(), places = pages * page;
        const int64_t written = input.range<int64_t>(0, std::min<int64_t>(5, places));
        int64_t* slots = numbers(written, 0, places - written);
        std::sort(slots, slots + written);
        for (int64_t i = 0; i < written; i++) slots[i] += i;
        const size_t piece = type == Type::f32 ? width * 4 : type == Type::i8 ? width + 4 : width * 2;
        uint8_t *keys = in<uint8_t>(pages * kv_heads * page * piece),
                *values = in<uint8_t>(pages * kv_heads * page * piece);
        const int64_t stride = kv_heads * width;
        add(WriteKv{in<float>(written * stride), in<float>(written * stride), keys, values, slots, written, kv_heads,
                    width, page, stride, stride, type});
        add(Attention{in<float>(asking * heads * width), keys, values, numbers(sequences * pages, 0, pages - 1),
                      query_starts, lens, out<float>(asking * heads * width), sequences, heads, kv_heads, width, page,
                      pages, asking, 0.3f, type});
    }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Input input(data, size);
    static std::vector<float> room(1 << 16);
    Context context{pool_of(input), kernels_generic(), {room.data(), static_cast<int64_t>(room.size())}};
    Tape tape;
    Step step{input, tape, context, {}, {}, {}};
    for (int ops = input.range(1, 4); ops > 0; ops--) step.op();
    for (const auto& output : step.outputs) step.first.push_back(*output);
    for (int replay = 0; replay < 2; replay++) {
        for (const auto& output : step.outputs) std::fill(output->begin(), output->end(), 0xee);
        tape.replay(context);
        for (size_t i = 0; i < step.outputs.size(); i++)
            demand(*step.outputs[i] == step.first[i], "a replay writes what the ops wrote");
    }
    return 0;
}
