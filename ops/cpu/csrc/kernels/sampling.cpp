// Chooses the next token of each row of logits. A row is read a few times, in spans whose sums are kept, and never
// sorted: where top-k and top-p cut is found with a histogram of the probabilities and one sorted bin of it.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/elementwise.h"
#include "kernels/ops.h"
#include "kernels/vector.h"

namespace umbra {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kSpan = 1024;  // columns whose probabilities have a sum of their own
constexpr int kShift = 20;       // bits of a float that a bin of the histogram leaves open: 3 of the mantissa remain
constexpr int kBins = (0x3f800000 >> kShift) + 1;  // floats from 0 to 1
constexpr int64_t kWorthTwo = 1 << 12;             // columns that another thread is woken for

int64_t spans(int64_t width) { return (width + kSpan - 1) / kSpan; }

// As `uniform` in ops/sampling.py.
uint64_t mixed(uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}
double uniform(int64_t seed, int64_t position) {
    const uint64_t bits = mixed(mixed(static_cast<uint64_t>(seed)) + static_cast<uint64_t>(position));
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

// A row's probabilities, up to a common factor: the most probable token has 1.
struct Probabilities {
    float* p;         // (width)
    float* sums;      // (spans)
    int32_t* places;  // (width): room for columns
    int64_t width;

    double total() const {
        double all = 0;
        for (int64_t s = 0; s < spans(width); s++) all += sums[s];
        return all;
    }
};

CLONES void exponentiate(const float* x, float most, float inverse, const Probabilities& to) {
    float* p = to.p;
    for (int64_t start = 0; start < to.width; start += kSpan) {
        const int64_t end = std::min(to.width, start + kSpan);
        float lanes[kLanes] = {}, sum = 0;
        const auto one = [=](int64_t i) {
            const float v = (x[i] - most) * inverse;
            return p[i] = v >= -87.0f ? fast_exp(v) : 0.0f;  // nothing for NaN
        };
        int64_t i = start;
        for (; i + kLanes <= end; i += kLanes)
            for (int l = 0; l < kLanes; l++) lanes[l] += one(i + l);
        for (; i < end; i++) sum += one(i);
        to.sums[start / kSpan] = sum + add_lanes(lanes);
    }
}

// Removes the tokens below `least`.
CLONES void remove_below(const Probabilities& from, float least) {
    for (int64_t start = 0; start < from.width; start += kSpan) {
        const int64_t end = std::min(from.width, start + kSpan);
        float* p = from.p;
        float lanes[kLanes] = {}, sum = 0;
        int64_t i = start;
        for (; i + kLanes <= end; i += kLanes)
            for (int l = 0; l < kLanes; l++) {
                const float v = p[i + l] < least ? 0.0f : p[i + l];
                p[i + l] = v;
                lanes[l] += v;
            }
        for (; i < end; i++) sum += p[i] = p[i] < least ? 0.0f : p[i];
        from.sums[start / kSpan] = sum + add_lanes(lanes);
    }
}

// Writes the columns whose probability is at least `least` to `places`, and returns their number.
CLONES int64_t gather(const Probabilities& from, float least) {
    int64_t count = 0, i = 0;
    for (; i + kLanes <= from.width; i += kLanes) {
        int any = 0;
        for (int l = 0; l < kLanes; l++) any |= from.p[i + l] >= least;
        if (!any) continue;
        for (int l = 0; l < kLanes; l++) {
            from.places[count] = static_cast<int32_t>(i + l);
            count += from.p[i + l] >= least;
        }
    }
    for (; i < from.width; i++)
        if (from.p[i] >= least) from.places[count++] = static_cast<int32_t>(i);
    return count;
}

// At most the `k`-th largest probability: the k-th largest of the maxima of kGroups groups of columns.
CLONES float below_top(const Probabilities& from, int64_t k) {
    constexpr int64_t kGroups = 256;
    if (k > kGroups / 4) return 0;
    float most[kGroups] = {};
    int64_t i = 0;
    for (; i + kGroups <= from.width; i += kGroups)
        for (int64_t g = 0; g < kGroups; g++) most[g] = from.p[i + g] > most[g] ? from.p[i + g] : most[g];
    for (int64_t g = 0; i + g < from.width; g++) most[g] = std::max(most[g], from.p[i + g]);
    std::nth_element(most, most + k - 1, most + kGroups, std::greater<>());
    return most[k - 1];
}

// Removes all tokens but the most probable ones, the first of equal ones before the others, whose weights, `weight(p)`
// each, reach `goal`. Tokens below `least` are not needed to reach it. With `ties`, tokens that are as probable as the
// last one stay as well.
template <class Weight>
void keep_most(const Probabilities& of, float least, double goal, bool ties, Weight&& weight) {
    const int64_t count = gather(of, std::max(least, std::numeric_limits<float>::min()));
    double bins[kBins] = {};
    const auto bin_of = [&](int32_t i) {
        int32_t bits;
        __builtin_memcpy(&bits, of.p + i, 4);
        return bits >> kShift;
    };
    for (int64_t j = 0; j < count; j++) bins[bin_of(of.places[j])] += weight(of.p[of.places[j]]);
    int bin = kBins - 1;
    double reached = 0;
    while (bin > 0 && reached + bins[bin] < goal) reached += bins[bin--];
    int32_t* end = std::remove_if(of.places, of.places + count, [&](int32_t i) { return bin_of(i) != bin; });
    std::sort(of.places, end, [&](int32_t a, int32_t b) { return of.p[a] > of.p[b] || (of.p[a] == of.p[b] && a < b); });
    int32_t* last = of.places;
    while (last != end && (reached += weight(of.p[*last])) < goal) last++;
    if (last == end) return;  // the sums were rounded: all are needed
    const float lowest = of.p[*last++];
    for (; !ties && last != end && of.p[*last] == lowest; last++) of.p[*last] = 0;
    remove_below(of, lowest);
}

int64_t draw(const Probabilities& from, double number) {
    const double total = from.total(), wanted = std::min(number * total, std::nextafter(total, 0.0));
    double reached = 0;
    int64_t last = -1;
    for (int64_t s = 0; s < spans(from.width); s++) {
        if (reached + from.sums[s] <= wanted) {
            reached += from.sums[s];
            continue;
        }
        for (int64_t i = s * kSpan; i < std::min(from.width, (s + 1) * kSpan); i++) {
            reached += from.p[i];
            if (from.p[i] > 0) last = i;
            if (reached > wanted) return last;
        }
    }
    return last;  // a span's sum was rounded up
}

// Applies the penalties to the logits x (width); `seen` is room for as many numbers.
void penalise(const Choice& choice, float* x, int32_t* seen) {
    const auto unique = [&](int64_t begin, auto&& f) {  // f(token, how often it is there)
        for (int64_t i = begin; i < choice.position; i++) seen[choice.ids[i]] = 0;
        for (int64_t i = begin; i < choice.position; i++) seen[choice.ids[i]]++;
        for (int64_t i = begin; i < choice.position; i++) {
            const int64_t token = choice.ids[i];
            if (seen[token]) f(x[token], seen[token]);
            seen[token] = 0;
        }
    };
    const float penalty = static_cast<float>(choice.repetition);
    if (penalty != 1) unique(0, [&](float& v, int32_t) { v = v > 0 ? v / penalty : v * penalty; });
    if (choice.presence != 0 || choice.frequency != 0)
        unique(choice.prompt,
               [&](float& v, int32_t times) { v -= static_cast<float>(times * choice.frequency + choice.presence); });
}

// The row's logits as the request wants them: in `to` if that changes any.
const float* adjusted(const Choice& choice, const float* logits, float* to, int32_t* seen, int64_t width) {
    if (!choice.adjusts()) return logits;
    std::copy(logits, logits + width, to);
    for (int64_t i = 0; i < choice.biases; i++) to[choice.biased[i]] += static_cast<float>(choice.bias[i]);
    penalise(choice, to, seen);
    for (int64_t i = 0; choice.allowed && i < width; i++)
        if (i / 8 >= choice.allowed_bytes || !(choice.allowed[i / 8] >> i % 8 & 1)) to[i] = kNone;
    return to;
}

int64_t choose(const Choice& choice, const float* logits, float* scratch, int64_t width) {
    const Probabilities row{scratch, scratch + 2 * width, reinterpret_cast<int32_t*>(scratch + width), width};
    const float* x = adjusted(choice, logits, row.p, row.places, width);
    const float most = choice.temperature == 0 ? kNone : largest(x, width);
    // A row without finite logits has no probabilities.
    if (!std::isfinite(most)) return first_largest(x, width);
    exponentiate(x, most, static_cast<float>(1 / std::max(choice.temperature, 1e-30)), row);
    if (choice.top_k > 0 && choice.top_k < width)
        keep_most(row, below_top(row, choice.top_k), static_cast<double>(choice.top_k), true,
                  [](float) { return 1.0; });
    if (choice.top_p < 1) {
        const double total = row.total();
        // All tokens below `least` have at most half of what top-p leaves out.
        const double least = (1 - choice.top_p) * total / static_cast<double>(2 * width);
        keep_most(row, static_cast<float>(least), choice.top_p * total, false, [](float p) { return p; });
    }
    if (choice.min_p > 0) remove_below(row, static_cast<float>(choice.min_p));
    return draw(row, uniform(choice.seed, choice.position));
}

}  // namespace

int64_t Sample::scratch_floats(int64_t width) { return 2 * width + spans(width); }

void Sample::run(Context& context) const {
    const auto one = [&](int row, int thread) {
        out[row] = choose(choices[row], logits + row * width, scratch + thread * scratch_floats(width), width);
    };
    if (rows == 1 || rows * width < kWorthTwo) {
        for (int row = 0; row < rows; row++) one(row, 0);
        return;
    }
    context.pool.each(static_cast<int>(rows), one);
}

}  // namespace umbra
