// Grids of random entries for the formats of records: what these mean is tested from Python.
#pragma once

#include "checks.h"
#include "kernels/records.h"

inline void set_grids() {
    for (const umbra::FormatTraits& format : umbra::kFormatTraits) {
        if (!format.records() || format.record >= umbra::Record::q2_k) continue;
        const bool eighths = format.record == umbra::Record::iq1_s || format.record == umbra::Record::iq1_m;
        std::vector<int8_t> entries(2048 * 8);
        for (int8_t& entry : entries) entry = static_cast<int8_t>(eighths ? 8 * below(3) - 8 : 1 + below(62));
        umbra::set_grid(format.record, entries.data(), 2048);
    }
}
