// The engine of this process and what the bindings share. Bindings take addresses and sizes and do not
// depend on torch: ops/cpu checks types and shapes before it passes addresses. What makes an object returns a plain
// pointer: pybind11 frees that of a smart one twice if it has no memory to register the object.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/tape.h"

namespace umbra {

// One per process: a pool, a set of kernels, and the tape that is being captured, if any.
struct Engine {
    std::vector<Team> teams, wide_teams;
    std::unique_ptr<Pool> pool;
    std::unique_ptr<Pool> wide;  // more threads on the same nodes, for steps in which other pools rest; or null
    bool widened = false;        // whether ops run on `wide`
    const Kernels* kernels = nullptr;
    std::unique_ptr<float[]> memory;  // of `room`
    Room room;
    Tape* capturing = nullptr;

    Context context() const { return {widened ? *wide : *pool, *kernels, room}; }
    int most_threads() const { return (wide ? wide : pool)->threads(); }
};
extern Engine engine;

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Runs an op and, while a tape is being captured, records it.
template <class Op>
void submit(const Op& op) {
    if (engine.capturing) engine.capturing->add(op);
    pybind11::gil_scoped_release release;
    Context context = engine.context();
    op.run(context);
}

// Ops index a matrix's parts by NUMA node, so it works only on pools with as many nodes as it was made for, and with
// kernels that read its order. Returns w.
const SplitMatrix& fitting(const SplitMatrix& w);

// Each adds its part to the Python module.
void bind_engine(pybind11::module_& m);
void bind_weights(pybind11::module_& m);
void bind_ops(pybind11::module_& m);
void bind_shadow(pybind11::module_& m);

}  // namespace umbra
