// The project's tiling header as a kernel sees it: plain structs with the same fields. The real build generates them.
//
// It is included before a kernel's first line. Not modelled: arrays and nested structs in tiling data.
#pragma once
#include <cstdint>

#define BEGIN_TILING_DATA_DEF(name) struct name {
#define TILING_DATA_FIELD_DEF(type, name) type name = 0
#define END_TILING_DATA_DEF }
#define REGISTER_TILING_DATA_CLASS(op, name)
#include TWIN_TILING_HEADER
namespace optiling {}
using namespace optiling;
