// Steps of a tape whose experts go between steps and come within them, as soon as a copier has filled their slots; built
// with ThreadSanitizer, and with AddressSanitizer. Every step must give the bits of Moe, and so must jobs for what is
// missing, on a pool of their own. At the end pools are stopped and destroyed at work.

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <numeric>

#include "runtime/tape.h"
#include "shadow/copier.h"
#include "shadow/worker.h"
#include "weights.h"

using namespace umbra;

namespace {

constexpr int kSteps = 80;
constexpr int64_t kTokens = 5, kHidden = 64, kInner = 96, kExperts = 8, kTopK = 3, kSlots = 3, kLayers = 2;
constexpr int64_t k13 = 2 * kInner * kHidden / 2, k2 = kHidden * kInner / 2;  // bytes of quants; q4
constexpr int64_t kBlockBytes = k13 + k13 / 8 + k2 + k2 / 8;                  // scales: 2 bytes for 32 weights

int64_t address(const void* at) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(at)); }

// The blocks' matrices at address 0, rows divided as `split` says.
template <class Split>
SplitMatrix relative(int rows, int columns, int unit, int64_t quants, int64_t scales, Split&& split) {
    std::vector<Matrix> parts;
    const std::vector<int> firsts = split(rows / unit);
    for (size_t n = 0; n + 1 < firsts.size(); n++) {
        Matrix part;
        part.format = format_named("q4");
        part.n = (firsts[n + 1] - firsts[n]) * unit;
        part.k = columns;
        part.group = 32;
        const int64_t skipped = int64_t{firsts[n]} * unit * columns;
        part.quants = reinterpret_cast<const uint8_t*>(quants + skipped / 2);
        part.scales = reinterpret_cast<const uint16_t*>(scales + skipped / 16);
        parts.push_back(part);
    }
    return SplitMatrix(parts);
}

struct Interrupt {  // a step that ends between Submit and Join
    const bool* now;
    void run(Context&) const {
        if (*now) throw std::runtime_error("interrupted");
    }
};

struct Call {  // as a bridge's callback makes it
    Job job{};
    std::vector<int32_t> places = std::vector<int32_t>(kExperts);
    std::mutex guard;
    std::condition_variable moved;
    int told = 0, failed = 0;

    static void done(Job* job, int failed) {
        Call& call = *reinterpret_cast<Call*>(job);
        std::lock_guard<std::mutex> lock(call.guard);
        call.told++;
        call.failed = failed;
        call.moved.notify_all();
    }
    bool run(Worker& worker) {  // whether it was done
        told = 0;
        job.done = done;
        if (Worker::submit(&worker, &job) != 0) return false;
        std::unique_lock<std::mutex> lock(guard);
        moved.wait(lock, [&] { return told != 0; });
        return told == 1 && !failed;
    }
};

struct Layer {
    std::vector<int64_t> store, device, counts, times, slot_of;
    std::vector<int> free;  // slots
    std::vector<std::atomic<int64_t>> arrived = std::vector<std::atomic<int64_t>>(kExperts);
    std::vector<uint64_t> copies = std::vector<uint64_t>(kExperts);  // tickets of those not published; 0: none
    int64_t hits = 0;
};

int stress(const std::vector<Team>& teams, const std::vector<Team>& shadow_teams) {
    Pool pool(teams);
    Context context{pool, kernels_generic()};
    const auto shadow = std::make_shared<ShadowPool>(shadow_teams, kernels_generic(), 30);
    Copier copier;

    // All-resident weights, and the same ones in blocks.
    const std::vector<Team> one{Team{}};
    Pool alone(one);
    const Weights w13(alone, one, kExperts, 2 * kInner, kHidden, 64), w2(alone, one, kExperts, kHidden, kInner);
    Buffer store(kExperts * kBlockBytes), slots(kLayers * kSlots * kBlockBytes);
    auto* const blocks = reinterpret_cast<uint8_t*>(store.address());
    auto* const places = reinterpret_cast<uint8_t*>(slots.address());
    std::vector<uint8_t> aside(kBlockBytes);
    for (int64_t e = 0; e < kExperts; e++) {
        const Matrix a = w13.matrix.like().at(e), b = w2.matrix.like().at(e);
        uint8_t* to = blocks + e * kBlockBytes;
        std::memcpy(to, a.quants, k13);
        std::memcpy(to + k13, a.scales, k13 / 8);
        std::memcpy(to + k13 + k13 / 8, b.quants, k2);
        std::memcpy(to + k13 + k13 / 8 + k2, b.scales, k2 / 8);
    }
    const auto matrices = [&](auto&& split) {
        return std::make_pair(relative(2 * kInner, kHidden, 64, 0, k13, split),
                              relative(kHidden, kInner, 16, k13 + k13 / 8, k13 + k13 / 8 + k2, split));
    };
    const auto ours = matrices([&](int count) {
        std::vector<int> firsts;
        for (int n = 0; n <= pool.nodes(); n++) firsts.push_back(pool.first(count, n));
        return firsts;
    });
    const auto theirs = matrices([&](int count) { return shadow->split(count); });

    std::vector<float> x(kTokens * kHidden), weights(kTokens * kTopK), expected(kTokens * kHidden);
    std::vector<std::vector<float>> outs(kLayers, expected);
    std::vector<int64_t> ids(kTokens * kTopK);
    std::vector<float> rows(kTokens * kTopK * kHidden);
    const auto bytes = Moe::scratch_bytes(kTokens, kTopK, kExperts, kHidden, kInner);
    std::vector<uint8_t> scratch(bytes), shadow_scratch(bytes), job_scratch(bytes);
    int64_t step = 0, interrupted = 0;
    bool interrupt = false;
    Tape tape;
    std::vector<Layer> layers(kLayers);
    const auto jobs_pool = std::make_shared<ShadowPool>(shadow_teams, kernels_generic(), 30);
    Worker worker(jobs_pool);
    std::vector<float> job_x(x), job_rows(rows), sums(x);
    std::vector<int64_t> job_ids(ids), job_counts(kExperts), job_times(4), missing(ids);
    int64_t job_hits = 0;
    std::vector<uint8_t> job_live(kTokens, 1);
    std::vector<int32_t> narrow_ids(ids.size());
    std::vector<Call> calls(kLayers);
    for (int64_t l = 0; l < kLayers; l++) {
        Layer& layer = layers[l];
        for (int64_t e = 0; e < kExperts; e++) layer.store.push_back(address(blocks + e * kBlockBytes));
        layer.device = layer.counts = std::vector<int64_t>(kExperts);
        layer.slot_of = std::vector<int64_t>(kExperts, -1);
        layer.times = {0, 0, 0, 0};
        layer.free.resize(kSlots);
        std::iota(layer.free.begin(), layer.free.end(), static_cast<int>(l * kSlots));
        const auto part = [&](const auto& handles, const int64_t* table, const int64_t* elsewhere, uint8_t* memory) {
            return MoeRows{handles.first, handles.second, table, elsewhere, x.data(), ids.data(), rows.data(),
                           memory,        kTokens,        kTopK, kExperts,  0,        kHidden,    kInner};
        };
        const auto work = std::make_shared<ShadowWork>(ShadowWork{
            part(theirs, layer.store.data(), layer.device.data(), shadow_scratch.data()), l, &step, nullptr});
        tape.add(Submit{shadow, work, layer.counts.data(), &layer.hits, layer.arrived.data()});
        if (l == 1) tape.add(Interrupt{&interrupt});
        tape.add(part(ours, layer.device.data(), nullptr, scratch.data()));
        tape.add(Join{shadow,
                      work,
                      {rows.data(), weights.data(), ids.data(), outs[l].data(), kTokens, kTopK, kExperts, 0, kHidden},
                      layer.times.data()});
        const MoeRows rows{theirs.first, theirs.second,  layer.store.data(), nullptr,
                           job_x.data(), job_ids.data(), job_rows.data(),    job_scratch.data(),
                           kTokens,      kTopK,          kExperts,           0,
                           kHidden,      kInner};
        worker.add(std::make_shared<JobWork>(rows, l, nullptr, Type::f32, job_live.data(), job_counts.data(), &job_hits,
                                             job_times.data()));
        calls[l].job = {x.data(),
                        narrow_ids.data(),
                        weights.data(),
                        calls[l].places.data(),
                        sums.data(),
                        kTokens,
                        kTopK,
                        kHidden,
                        l,
                        0,
                        nullptr};
    }
    const Moe moe{w13.matrix, w2.matrix, x.data(), weights.data(), ids.data(), expected.data(), scratch.data(), kTokens,
                  kTopK,      kExperts,  0,        kHidden,        kInner};
    Moe moe_missing = moe;
    moe_missing.ids = missing.data();
    Context reference{alone, kernels_generic()};

    uint64_t random = 1;
    const auto below = [&](int64_t limit) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        return static_cast<int64_t>((random >> 33) % static_cast<uint64_t>(limit));
    };
    int64_t routed = 0, published = 0, within = 0;  // copies taken over between steps, and within one
    for (; step < kSteps; step++) {
        // Between steps: publish what was copied, take an expert away, its copy in flight or not, and start a copy into a
        // free slot, behind others, so that it ends at any moment of the steps to come.
        for (Layer& layer : layers) {
            for (int64_t e = 0; e < kExperts; e++) {
                if (!layer.copies[e] || !copier.done(layer.copies[e])) continue;
                (layer.device[e] ? within : published)++;
                layer.device[e] = address(places + layer.slot_of[e] * kBlockBytes);
                layer.copies[e] = 0;
            }
            const int64_t out = below(kExperts), in = below(kExperts);
            if (layer.slot_of[out] >= 0 && below(3) == 0) {
                if (layer.copies[out]) copier.wait(layer.copies[out]);
                layer.free.push_back(static_cast<int>(layer.slot_of[out]));
                layer.device[out] = layer.arrived[out] = layer.copies[out] = 0;
                layer.slot_of[out] = -1;
            }
            if (layer.slot_of[in] >= 0 || layer.free.empty()) continue;
            for (int64_t i = below(80); i > 0; i--) copier.submit(aside.data(), blocks, {{0, 0, kBlockBytes}});
            uint8_t* const to = places + (layer.slot_of[in] = layer.free.back()) * kBlockBytes;
            layer.free.pop_back();
            layer.copies[in] = copier.submit(to, blocks + in * kBlockBytes, {{0, 0, kBlockBytes}}, &layer.arrived[in]);
        }
        for (float& v : x) v = pseudo_random(below(1 << 30));
        for (float& v : weights) v = pseudo_random(below(1 << 30));
        for (int64_t& id : ids) id = below(kExperts + 2) - 1;  // some outside
        for (const int64_t id : ids) routed += id >= 0 && id < kExperts;
        if ((interrupt = step % 4 == 1)) {  // its work may be under way while the step is run once more
            try {
                tape.replay(context);
            } catch (const std::runtime_error&) {
                interrupt = false;
            }
            for (const int64_t id : ids) interrupted += id >= 0 && id < kExperts;
        }
        for (Layer& layer : layers) layer.hits = 0;
        tape.replay(context);
        for (Layer& layer : layers) {
            for (const int64_t id : ids) layer.hits -= id >= 0 && id < kExperts && layer.device[id];
            if (layer.hits) {
                std::puts("other hits");
                return 1;
            }
        }
        moe.run(reference);
        for (const auto& out : outs)
            if (std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) != 0) {
                std::printf("other results in step %d\n", static_cast<int>(step));
                return 1;
            }
        std::copy(ids.begin(), ids.end(), narrow_ids.begin());
        for (Call& call : calls) {
            for (int64_t e = 0; e < kExperts; e++) call.places[e] = layers[call.job.layer].device[e] ? 0 : -1;
            for (size_t a = 0; a < ids.size(); a++)
                missing[a] = ids[a] >= 0 && ids[a] < kExperts && call.places[ids[a]] < 0 ? ids[a] : -1;
            moe_missing.run(reference);
            if (!call.run(worker) || std::memcmp(sums.data(), expected.data(), sums.size() * sizeof(float)) != 0) {
                std::printf("other sums in step %d\n", static_cast<int>(step));
                return 1;
            }
        }
        if (step % 100 == 0) usleep(3000);  // long enough for all to fall asleep
    }
    for (const Layer& layer : layers)
        if (std::accumulate(layer.counts.begin(), layer.counts.end(), int64_t{0}) != routed + interrupted) {
            std::puts("miscounted");
            return 1;
        }
    if (std::accumulate(job_counts.begin(), job_counts.end(), int64_t{0}) != kLayers * routed) {
        std::puts("jobs miscounted");
        return 1;
    }
    if (published < kSteps / 20 || within < kSteps / 20) {
        std::printf("copies published: %d, within steps: %d\n", static_cast<int>(published), static_cast<int>(within));
        return 1;
    }

    // The end comes while all are at work: from another thread, in the middle of steps, with copies queued.
    for (Layer& layer : layers) {
        for (int64_t e = 0; e < kExperts; e++) {
            if (layer.copies[e]) copier.wait(layer.copies[e]);
            layer.device[e] = layer.arrived[e] = 0;
        }
    }
    for (auto& id : ids) id = below(kExperts);
    for (int i = 0; i < 50; i++) copier.submit(places, blocks, {{0, 0, kBlockBytes}});
    std::thread killer([&] {
        usleep(2000);
        shadow->stop();
        copier.stop();
    });
    int survived = 0;
    try {
        for (;; survived++) tape.replay(context);
    } catch (const ShadowError& error) {
        const std::string start = "shadow experts: layer ", text = error.what();
        if (text.compare(0, start.size(), start) != 0) survived = -1;
    }
    killer.join();

    std::copy(ids.begin(), ids.end(), narrow_ids.begin());
    std::thread jobs_killer([&] {
        usleep(2000);
        jobs_pool->stop();
    });
    while (calls[0].run(worker)) {
    }
    jobs_killer.join();
    return survived < 0 || calls[0].told != 1 || !calls[0].failed || calls[1].run(worker);
}

}  // namespace

int main() {
    using Teams = std::vector<Team>;
    for (const auto& [ours, theirs] :
         std::vector<std::pair<Teams, Teams>>{{{{-1, 1, {}}}, {{-1, 1, {}}}},
                                              {{{-1, 2, {}}}, {{-1, 3, {}}}},
                                              {{{-1, 1, {}}, {-1, 1, {}}}, {{-1, 1, {}}, {-1, 2, {}}}}})
        if (stress(ours, theirs) != 0) return 1;
    std::puts("ok");
}
