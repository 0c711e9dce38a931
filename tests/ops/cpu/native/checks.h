// Random numbers and comparisons for the native tests; a mismatch ends the program with status 1.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace {

std::mt19937 generator(7);

int below(int limit) { return static_cast<int>(generator() % limit); }

std::vector<float> random_floats(size_t count) {  // -1 to 1
    std::vector<float> values(count);
    for (float& v : values) v = static_cast<float>(below(1 << 24)) / (1 << 23) - 1;
    return values;
}

[[noreturn]] void fail(const char* what, size_t at, double actual, double expected) {
    std::printf("MISMATCH: %s at %zu: %.9g, expected %.9g\n", what, at, actual, expected);
    std::exit(1);
}

template <class T>
void same(const char* what, const std::vector<T>& actual, const std::vector<T>& expected) {
    for (size_t i = 0; i < actual.size(); i++)
        if (std::memcmp(&actual[i], &expected[i], sizeof(T)) != 0) fail(what, i, actual[i], expected[i]);
}

void close(const char* what, const std::vector<float>& actual, const std::vector<float>& expected, float tolerance) {
    for (size_t i = 0; i < actual.size(); i++)
        if (!(std::fabs(actual[i] - expected[i]) <= tolerance)) fail(what, i, actual[i], expected[i]);
}

float largest(const std::vector<float>& values) {
    float most = 0;
    for (float v : values) most = std::max(most, std::fabs(v));
    return most;
}

}  // namespace
