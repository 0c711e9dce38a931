// Included before every source that Clang compiles: what GCC alone has.
#pragma once

template <class Vector, class Places>
Vector __builtin_shuffle(const Vector& low, const Vector& high, const Places& places) {
    constexpr unsigned kCount = sizeof(Vector) / sizeof(low[0]);
    Vector all{};
    for (unsigned i = 0; i < kCount; i++)
        all[i] = places[i] % (2 * kCount) < kCount ? low[places[i] % kCount] : high[places[i] % kCount];
    return all;
}
