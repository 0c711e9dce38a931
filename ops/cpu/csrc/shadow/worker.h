// The shadow pool as the worker of a bridge (../../ascend/csrc/bridge.cpp): each job's sums over the experts that are not
// resident, in the model's type.
//
// Who touches what. `submit`, in the thread of the callback, is the only one that reads a job's ids and slots: it counts
// the routing, keeps the ids of what is missing, others becoming -1, and sorts them. The pool's threads then read x, the
// weights, those ids and the store. So a job that is late, and still computed when the next step's tables are written,
// does not look at them. Scratch memory may belong to many works: one job is computed at a time, and while a late one is
// at it, others fail.
//
// Sums are those of AddRows over the missing experts: float32, in order of expert, rounded once.
#pragma once

#include <map>
#include <utility>

#include "shadow/shadow.h"

namespace umbra {

// One layer's jobs of one number of tokens.
struct JobWork : ShadowWork {
    Type type;            // the model's
    const uint8_t* live;  // (tokens) 0: only pads the step, so no expert of it is counted or computed
    int64_t* counts;      // (experts) += 1 for each pair
    int64_t* times;       // when the pool began and ended, and two zeros; 0: not needed
    Job* job = nullptr;
    std::vector<float> weights;

    // Of `rows`, x and ids are scratch memory too; `elsewhere` is not used.
    JobWork(const MoeRows& rows, int64_t layer, std::shared_ptr<void> keep, Type type, const uint8_t* live,
            int64_t* counts, int64_t* times)
        : ShadowWork(rows, layer, nullptr, std::move(keep)), type(type), live(live), counts(counts), times(times),
          weights(rows.tokens * rows.k) {}

    enum Missing { kNone, kSome, kNowhere };  // the last: not in the store either
    Missing take(Job* job);
    void compute(Context&) override;
    Job* finished() override;
};

class Worker {
public:
    explicit Worker(std::shared_ptr<ShadowPool> pool) : pool_(std::move(pool)) {}

    // Not while a step runs.
    void add(std::shared_ptr<JobWork> work) { works_[{work->layer, work->rows.tokens}] = std::move(work); }

    static int submit(void* worker, Job* job);  // a SubmitJob

private:
    std::shared_ptr<ShadowPool> pool_;
    std::map<std::pair<int64_t, int64_t>, std::shared_ptr<JobWork>> works_;  // by layer and tokens
};

}  // namespace umbra
