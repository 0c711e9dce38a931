// A small captured step, replayed many times on pools of several sizes and numbers of nodes; built with ThreadSanitizer.
// Every replay on every pool must give the same bits.

#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "runtime/tape.h"
#include "weights.h"

using namespace umbra;

namespace {

constexpr int kRounds = 12;
constexpr int64_t kTokens = 9, kWidth = 4096, kHidden = 32, kInner = 160, kExperts = 8, kTopK = 3;

std::vector<float> replayed(const std::vector<Team>& teams) {
    Pool pool(teams);
    Context context{pool, kernels_generic()};
    const Weights first(pool, teams, 1, kHidden, kWidth), router(pool, teams, 1, 16, kHidden);
    const Weights w13(pool, teams, kExperts, 2 * kInner, kHidden, 64), w2(pool, teams, kExperts, kHidden, kInner);
    std::vector<float> x(kTokens * kWidth), ones(kWidth, 1.0f), normed(x.size()), h(kTokens * kHidden), out(h.size());
    std::vector<float> logits(kTokens * kExperts), scores(logits.size()), weights(kTokens * kTopK);
    std::vector<int64_t> ids(kTokens * kTopK);
    std::vector<uint8_t> scratch(Scratch::bytes(kTokens, kWidth));
    std::vector<uint8_t> moe_scratch(Moe::scratch_bytes(kTokens, kTopK, kExperts, kHidden, kInner));
    Tape tape;
    tape.add(RmsNorm{x.data(), nullptr, ones.data(), normed.data(), nullptr, kTokens, 1, kWidth, kWidth, 1e-6f});
    tape.add(Linear{first.matrix, normed.data(), nullptr, h.data(), Scratch{scratch.data()}, kTokens, kHidden});
    tape.add(Linear{router.matrix, h.data(), nullptr, logits.data(), Scratch{scratch.data()}, kTokens, kExperts});
    tape.add(Route{logits.data(), nullptr, weights.data(), ids.data(), scores.data(), kTokens, kExperts, kTopK, false,
                   true, 1.0f});
    tape.add(Moe{w13.matrix, w2.matrix, h.data(), weights.data(), ids.data(), out.data(), moe_scratch.data(), kTokens,
                 kTopK, kExperts, 0, kHidden, kInner});
    std::vector<float> all;
    for (int round = 0; round < kRounds; round++) {
        for (size_t i = 0; i < x.size(); i++) x[i] = pseudo_random(round * 1000003 + static_cast<int64_t>(i));
        tape.replay(context);
        all.insert(all.end(), out.begin(), out.end());
        if (round % 5 == 0) usleep(3000);  // long enough for the workers to fall asleep
    }
    return all;
}

}  // namespace

int main() {
    const auto expected = replayed({Team{}});
    for (const auto& teams : std::vector<std::vector<Team>>{
             {{-1, 3, {}}}, {{-1, 2, {}}, {-1, 1, {}}}, {{-1, 1, {}}, {-1, 1, {}}, {-1, 2, {}}, {-1, 1, {}}}}) {
        const auto got = replayed(teams);
        if (std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)) != 0) {
            std::printf("other results on %zu nodes\n", teams.size());
            return 1;
        }
    }
    std::puts("ok");
}
