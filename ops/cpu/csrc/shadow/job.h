// A request from a step on the device to threads on the host. ops/ascend/csrc/bridge.cpp writes it, worker.h computes
// it, and ops/ascend/bridge.py mirrors the struct for Python.
#pragma once

#include <cstdint>

namespace umbra {

struct Job {
    const void* x;          // (tokens, hidden), the model's type
    const int32_t* ids;     // (tokens, top_k)
    const void* weights;    // (tokens, top_k), the model's type
    const int32_t* places;  // (experts) who is resident, as the device sees it in this step; below 0: not resident
    void* sums;  // (tokens, hidden), the model's type; must be written in full even if every expert is resident
    int64_t tokens, top_k, hidden, layer, step;
    // Called once for each submit that returned 0, from any thread, possibly within submit.
    void (*done)(Job*, int failed);
};
using SubmitJob = int (*)(void* context, Job*);  // returns without waiting; not 0: refused

}  // namespace umbra
