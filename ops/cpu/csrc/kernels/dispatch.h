// Which kernels this CPU can run. Compiled without any instruction-set flags, so that every CPU can execute it.
#pragma once

#include <string>
#include <vector>

#include "kernels/matrix.h"

namespace umbra {

// Names of the sets that this CPU can run, the best last.
std::vector<std::string> usable_sets();

// The kernels of a set; "auto" means the best. Throws std::invalid_argument with one line naming what the CPU lacks.
const Kernels& choose_kernels(const std::string& name);

}  // namespace umbra
