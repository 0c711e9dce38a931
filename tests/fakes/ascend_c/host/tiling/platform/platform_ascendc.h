// The platform: as many vector cores as the caller asked for, and the sizes of Atlas A3.
#pragma once
#include "gert.h"

namespace platform_ascendc {
enum class CoreMemType { L1, L2, UB };
class PlatformAscendC {
public:
    explicit PlatformAscendC(void* info) : cores(*static_cast<uint32_t*>(info)) {}
    uint32_t GetCoreNumAiv() const { return cores; }
    uint32_t GetLibApiWorkSpaceSize() const { return 16 << 20; }
    void GetCoreMemSize(CoreMemType type, uint64_t& size) const { size = type == CoreMemType::UB ? 192 << 10 : 0; }

private:
    uint32_t cores;
};
}  // namespace platform_ascendc
