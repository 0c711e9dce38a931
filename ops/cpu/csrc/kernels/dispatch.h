// Which kernels this machine can run. Compiled without any instruction set, so asking is safe everywhere.
#pragma once

#include <string>
#include <vector>

#include "kernels/matrix.h"

namespace umbra {

// Names of the sets that work here, the best last.
std::vector<std::string> usable_sets();

// The kernels of a set; "auto": the best. Throws std::invalid_argument with one line that says what the CPU lacks.
const Kernels& choose_kernels(const std::string& name);

}  // namespace umbra
