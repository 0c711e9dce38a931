#pragma once

#include <pybind11/pybind11.h>

namespace umbra {

// Adds the ops of residual streams, of attention over chosen blocks, and of tables of n-grams to the Python module.
void bind_streams(pybind11::module_& m);

}  // namespace umbra
