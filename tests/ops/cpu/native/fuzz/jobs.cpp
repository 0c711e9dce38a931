// Jobs of the bridge, through the worker to the shadow pool: any ids and places, values of any bits, sizes that no work
// was made for, and AscendCL's calls refused in any order. A job is answered once, in full, and only its sums are
// written; what the worker does not know it refuses.

#include "input.h"
#include "ops/ascend/csrc/bridge.cpp"
#include "shadow/copier.h"
#include "shadow/worker.h"

using namespace umbra;

namespace {

constexpr int64_t kLayers = 2, kMostTokens = 4, kHidden = 32, kInner = 32, kExperts = 6, kTopK = 3;
constexpr size_t k13 = 2 * kInner * kHidden, k2 = kHidden * kInner, kBlockBytes = (k13 + k2) / 2 * 9 / 8;

std::vector<int> refusals;  // what the next calls of AscendCL answer
int answer() {
    if (refusals.empty()) return 0;
    const int status = refusals.back();
    refusals.pop_back();
    return status;
}

struct Layer {
    Plane blocks{kExperts * kBlockBytes, 0x35};
    std::vector<int64_t> address = std::vector<int64_t>(kExperts), counts = address;
    std::vector<int64_t> hits = std::vector<int64_t>(1), times = std::vector<int64_t>(4);
    std::vector<uint8_t> live = std::vector<uint8_t>(kMostTokens, 1);
    std::vector<float> x = std::vector<float>(kMostTokens * kHidden);
    std::vector<int64_t> ids = std::vector<int64_t>(kMostTokens * kTopK);
    std::vector<float> rows = std::vector<float>(kMostTokens * kTopK * kHidden);
    std::vector<uint8_t> scratch =
        std::vector<uint8_t>(Moe::scratch_bytes(kMostTokens, kTopK, kExperts, kHidden, kInner));

    std::shared_ptr<JobWork> work(int64_t layer, int64_t tokens, Type type) {
        const auto matrix = [](size_t at, int64_t n, int64_t k) {
            Matrix w;
            w.format = format_named("q4"), w.n = static_cast<int32_t>(n), w.k = static_cast<int32_t>(k), w.group = 32;
            w.quants = reinterpret_cast<const uint8_t*>(at);
            w.scales = reinterpret_cast<const uint16_t*>(at + n * k / 2);
            return w;
        };
        for (int64_t e = 0; e < kExperts; e++)
            address[e] = reinterpret_cast<int64_t>(blocks.at()) + e * static_cast<int64_t>(kBlockBytes);
        const MoeRows moe{matrix(0, 2 * kInner, kHidden),
                          matrix(k13 / 2 * 9 / 8, kHidden, kInner),
                          address.data(),
                          nullptr,
                          x.data(),
                          ids.data(),
                          rows.data(),
                          scratch.data(),
                          tokens,
                          kTopK,
                          kExperts,
                          1,
                          kHidden,
                          kInner};
        return std::make_shared<JobWork>(moe, layer, nullptr, type, live.data(), counts.data(), hits.data(),
                                         times.data());
    }
};

struct Host {
    Layer layers[kLayers];
    std::shared_ptr<ShadowPool> pool =
        std::make_shared<ShadowPool>(std::vector<Team>{{-1, 1, {}}}, kernels_generic(), 10);
    Worker worker{pool};
    Host() {
        for (int64_t layer = 0; layer < kLayers; layer++)
            for (int64_t tokens = 1; tokens <= kMostTokens; tokens++)
                worker.add(layers[layer].work(layer, tokens, static_cast<Type>(layer + 1)));
    }
};

void copies(Input& input) {  // a copier that is stopped at any time
    const Plane from(256, 7), to(256);
    Copier copier;
    uint64_t last = 0;
    for (int i = input.range(0, 4); i > 0; i--) {
        std::vector<Piece> pieces;
        for (int n = input.range(0, 3); n > 0; n--) {
            const int64_t bytes = input.range<int64_t>(0, 256);
            pieces.push_back({input.range<int64_t>(0, 256 - bytes), input.range<int64_t>(0, 256 - bytes), bytes});
        }
        try {
            last = copier.submit(to.at(), from.at(), pieces);
            if (input.flag()) copier.wait(last);
            if (!input.range(0, 3)) copier.stop();
            copier.done(input.ConsumeIntegral<uint64_t>());
        } catch (const ShadowError&) {
        }
    }
}

}  // namespace

extern "C" {
int aclrtGetCurrentContext(void** context) { return *context = &refusals, answer(); }
int aclrtSetCurrentContext(void*) { return 0; }
int aclrtSubscribeReport(uint64_t, Stream) { return answer(); }
int aclrtUnSubscribeReport(uint64_t, Stream) { return 0; }
int aclrtProcessReport(int32_t) { return std::this_thread::sleep_for(milliseconds(1)), kReportTimeout; }
int aclrtSynchronizeStreamWithTimeout(Stream, int32_t) { return answer(); }
int aclrtSynchronizeDeviceWithTimeout(int32_t) { return 0; }
int aclrtLaunchCallback(void (*function)(void*), void* data, int, Stream) {
    if (const int status = answer()) return status;
    return function(data), 0;
}
int aclrtLaunchHostFunc(Stream stream, void (*function)(void*), void* data) {
    return aclrtLaunchCallback(function, data, 0, stream);
}
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Input input(data, size);
    static Host shared;
    std::unique_ptr<Host> own;
    if (!input.range(0, 63)) own = std::make_unique<Host>();  // one whose pool may be stopped
    if (!input.range(0, 63)) copies(input);
    Host& host = own ? *own : shared;
    if (own && input.flag()) host.pool->stop();

    for (int i = input.range(0, 4); i > 0; i--) refusals.push_back(input.one_of({0, 1, kSyncTimeout, kReportTimeout}));
    const int64_t limit = input.range(0, 7) ? 10000 : 0;
    Bridge* bridge = umbra_bridge_open(input.range(0, 63) ? nullptr : "/nowhere.so", Worker::submit, &host.worker,
                                       limit, input.range(0, 63) != 0);
    if (!bridge) {
        demand(umbra_bridge_told()[0] != 0, "a refusal says why");
        refusals.clear();
        return 0;
    }
    for (int i = input.range(0, 40); i >= 0; i--)
        umbra_bridge_subscribe(bridge, reinterpret_cast<Stream>(input.range<uintptr_t>(1, 40)));

    for (int jobs = input.range(1, 3); jobs > 0; jobs--) {
        const int64_t tokens = input.range<int64_t>(1, kMostTokens), layer = input.range<int64_t>(0, kLayers - 1);
        const auto ids = input.values<int32_t>(tokens * kTopK);
        std::vector<int32_t> near(ids);
        if (input.flag())
            for (int32_t& id : near) id = id % 9 - 1;  // most of them experts of this rank
        const auto x = input.values<uint16_t>(tokens * kHidden), weights = input.values<uint16_t>(tokens * kTopK);
        const std::vector<int32_t> places = input.values<int32_t>(kExperts);
        std::vector<uint16_t> sums(tokens * kHidden, 0x1234);
        for (uint8_t& live : host.layers[layer].live) live = input.flag();
        auto& address = host.layers[layer].address;
        const size_t lost = input.range<size_t>(0, 15);  // an expert that the store does not have
        const int64_t before = lost < kExperts ? std::exchange(address[lost], 0) : 0;

        Job job{x.data(), near.data(), weights.data(), places.data(), sums.data(), tokens, kTopK, kHidden,
                layer,    -1,          nullptr};
        for (int64_t* size : {&job.tokens, &job.top_k, &job.hidden, &job.layer})
            if (!input.range(0, 31))
                *size = input.flag() ? input.range<int64_t>(-1, 6) : input.ConsumeIntegral<int64_t>();
        // More tokens than this job's memory holds, for which there is a work, would be a mistake of the engine.
        if (job.tokens > tokens && job.tokens <= kMostTokens) job.tokens = tokens;
        const bool known = job.tokens >= 1 && job.tokens <= tokens && job.top_k == kTopK && job.hidden == kHidden &&
                           job.layer >= 0 && job.layer < kLayers;

        umbra_bridge_begin(bridge, input.ConsumeIntegral<int64_t>());
        Payload* payload = umbra_payload_new(bridge, &job, sums.size() * sizeof sums[0]);
        const int status = umbra_bridge_launch(bridge, nullptr, payload);
        umbra_bridge_synchronize(bridge, nullptr, 1);
        const char* error = umbra_bridge_error(bridge, input.range(0, 15) ? nullptr : "the stream does not end");
        if (!status && !error) {
            demand(known, "a job of unknown sizes is an error");
            demand(umbra_payload_seen(payload) != -2 && umbra_bridge_events(bridge) % 2 == 0, "the callback has ended");
            demand(sums[0] != 0x1234 || sums.back() != 0x1234 || x[0] || x.back(), "the sums are written");
        }
        if (jobs == 1 || error) {
            demand(umbra_bridge_close(bridge, 20000) == 0, "the bridge closes");
            umbra_payload_free(payload);
            if (lost < kExperts) address[lost] = before;
            break;
        }
        umbra_payload_free(payload);  // no callback of it is left: launches here run at once
        if (lost < kExperts) address[lost] = before;
    }
    umbra_bridge_free(bridge);
    refusals.clear();
    return 0;
}
