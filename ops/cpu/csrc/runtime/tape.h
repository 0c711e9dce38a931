// A captured step: a list of op structs that replays run in order, without Python, locks or allocation. Every op ends
// with a barrier of the pool, so the next op sees everything it wrote.
#pragma once

#include <memory>
#include <vector>

#include "kernels/ops.h"

namespace umbra {

class Tape {
public:
    template <class Op>
    void add(const Op& op) {
        records_.push_back({[](const void* op, Context& context) { static_cast<const Op*>(op)->run(context); },
                            std::make_shared<Op>(op)});
    }

    void replay(Context& context) const {
        for (const Record& record : records_) record.run(record.op.get(), context);
    }

    int64_t size() const { return static_cast<int64_t>(records_.size()); }

private:
    struct Record {
        void (*run)(const void* op, Context& context);
        std::shared_ptr<const void> op;
    };
    std::vector<Record> records_;
};

}  // namespace umbra
