// The Python module ops.cpu._native. ops/cpu/_native.pyi, made from it, has every signature.

#include "bindings/engine.h"
#include "bindings/streams.h"

PYBIND11_MODULE(_native, m) {
    umbra::bind_engine(m);  // first: the others' signatures name its classes
    umbra::bind_weights(m);
    umbra::bind_ops(m);
    umbra::bind_streams(m);
    umbra::bind_shadow(m);
}
