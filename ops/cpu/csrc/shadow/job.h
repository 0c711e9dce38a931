// What a step on the device asks of the host's threads: written by ../../ascend/csrc/bridge.cpp, done by worker.h.
// ../../ascend/bridge.py has the same for Python.
#pragma once

#include <cstdint>

namespace umbra {

struct Job {
    const void* x;         // (tokens, hidden), the model's type
    const int32_t* ids;    // (tokens, top_k)
    const void* weights;   // (tokens, top_k), the model's type
    const int64_t* slots;  // (experts): this layer's row of the device's table, on the host; 0: not resident
    void* sums;  // (tokens, hidden), the model's type: all of it is to be written, also where nothing is missing
    int64_t tokens, top_k, hidden, layer, step;
    void (*done)(Job*, int failed);  // once for each submit that returned 0, from any thread, also from within submit
};
using SubmitJob = int (*)(void* context, Job*);  // returns at once; not 0: refused

}  // namespace umbra
