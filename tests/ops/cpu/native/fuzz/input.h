// What the fuzz targets share: sizes and values taken from the fuzzer's bytes, and memory whose bounds
// AddressSanitizer knows to the byte.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/pool.h"

class Input : public FuzzedDataProvider {
public:
    using FuzzedDataProvider::FuzzedDataProvider;

    bool flag() { return ConsumeBool(); }
    template <class T>
    T range(T least, T most) {
        return ConsumeIntegralInRange<T>(least, most);
    }
    template <class T>
    T one_of(std::initializer_list<T> values) {
        return values.begin()[range<size_t>(0, values.size() - 1)];
    }
    // `count` values: the next bytes of the input, over and over, so that few bytes fill large tables.
    template <class T>
    std::vector<T> values(size_t count) {
        std::vector<uint8_t> seed = ConsumeBytes<uint8_t>(range<size_t>(1, 64));
        if (seed.empty()) seed.push_back(0);
        std::vector<T> all(count);
        auto* bytes = reinterpret_cast<uint8_t*>(all.data());
        const size_t size = count * sizeof(T);
        size_t done = std::min(size, seed.size());
        if (done) memcpy(bytes, seed.data(), done);
        for (size_t more; done < size; done += more) {  // as often as there are bytes: 1, 2, 4 ... times the seed
            more = std::min(size - done, done);
            memcpy(bytes + done, bytes, more);
        }
        return all;
    }
};

// Memory at a multiple of 64 bytes that ends where it is said to end.
struct Plane {
    std::unique_ptr<uint8_t, decltype(&std::free)> memory{nullptr, std::free};
    explicit Plane(size_t bytes, uint8_t value = 0) {
        void* at = nullptr;
        if (posix_memalign(&at, 64, bytes)) std::abort();
        memset(at, value, bytes);
        memory.reset(static_cast<uint8_t*>(at));
    }
    uint8_t* at() const { return memory.get(); }
};

inline void demand(bool holds, const char* rule) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", rule);
    std::abort();
}

// A pool of one thread, and now and then one of three or of two nodes; made once. Where all cores are busy, threads that
// wait for each other take milliseconds.
inline umbra::Pool& pool_of(Input& input) {
    static umbra::Pool pools[]{umbra::Pool(1), umbra::Pool(3), umbra::Pool({{-1, 1, {}}, {-1, 1, {}}})};
    const int number = input.range(0, 255);
    return pools[number < 254 ? 0 : number - 253];
}
