// Chooses tokens from hostile logits: any bits, at every setting that SamplingParams lets pass. The answer must be a
// token, and the same for a row alone and among others.

#include <cmath>

#include "input.h"
#include "kernels/ops.h"

using namespace umbra;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Input input(data, size);
    Pool& pool = pool_of(input);
    Context context{pool, kernels_generic()};
    const int64_t width = input.range(0, 15) ? input.range<int64_t>(1, 300) : input.range<int64_t>(1, 5000);
    const int64_t rows = input.range<int64_t>(1, 4);
    std::vector<float> logits = input.values<float>(rows * width);
    for (int64_t i = input.range<int64_t>(0, 8); i > 0; i--)
        logits[input.range<int64_t>(0, rows * width - 1)] = input.one_of(
            {INFINITY, -INFINITY, NAN, -NAN, 3e38f, -3e38f, 1e-45f, -0.0f, input.ConsumeFloatingPoint<float>()});

    struct Tables {
        std::vector<int64_t> ids, biased;
        std::vector<double> bias;
        std::vector<uint8_t> allowed;
    };
    std::vector<Tables> tables(rows);
    std::vector<Choice> choices;
    for (Tables& own : tables) {
        Choice c{};
        // A double of any bits that SamplingParams takes for a temperature.
        const double any = input.ConsumeFloatingPoint<double>();
        c.temperature = input.one_of({0.0, 1.0, 5e-324, 1.7e308, std::isfinite(any) ? std::fabs(any) : 0.0});
        c.top_p = input.one_of({1.0, 0.0, 5e-324, input.ConsumeProbability<double>()});
        c.min_p = input.one_of({0.0, 1.0, 5e-324, input.ConsumeProbability<double>()});
        c.presence = input.flag() ? input.ConsumeFloatingPointInRange<double>(-2, 2) : 0;
        c.frequency = input.flag() ? input.ConsumeFloatingPointInRange<double>(-2, 2) : 0;
        c.repetition = input.flag() ? input.ConsumeFloatingPointInRange<double>(0.01, 100) : 1;
        c.top_k = input.one_of<int64_t>({0, 1, width, INT64_MAX, input.range<int64_t>(0, 300)});
        c.seed = input.range<int64_t>(0, INT64_MAX);
        c.position = input.range<int64_t>(0, 40);
        c.prompt = input.range<int64_t>(0, c.position);
        for (int64_t i = 0; i < c.position; i++) own.ids.push_back(input.range<int64_t>(0, width - 1));
        c.ids = own.ids.data();
        c.biases = input.range<int64_t>(0, 3);
        for (int64_t i = 0; i < c.biases; i++) {
            own.biased.push_back(input.range<int64_t>(0, width - 1));
            own.bias.push_back(input.ConsumeFloatingPointInRange<double>(-100, 100));
        }
        c.biased = own.biased.data(), c.bias = own.bias.data();
        if (input.flag()) {  // a grammar: as many bits as there are tokens, fewer, or none
            own.allowed = input.values<uint8_t>(input.range<size_t>(1, width / 8 + 2));
            c.allowed = own.allowed.data();
            c.allowed_bytes = static_cast<int64_t>(own.allowed.size());
        }
        choices.push_back(c);
    }
    std::vector<float> scratch(pool.threads() * Sample::scratch_floats(width));
    std::vector<int64_t> out(rows, -7);
    Sample{logits.data(), choices.data(), out.data(), scratch.data(), rows, width}.run(context);
    for (int64_t row = 0; row < rows; row++) {
        demand(out[row] >= 0 && out[row] < width, "the answer is a token");
        int64_t alone = -7;
        Sample{logits.data() + row * width, &choices[row], &alone, scratch.data(), 1, width}.run(context);
        demand(alone == out[row], "a row alone has the same token as among others");
    }
    return 0;
}
