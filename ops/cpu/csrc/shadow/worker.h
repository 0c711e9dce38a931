// Uses the shadow pool as the worker of a bridge (ops/ascend/csrc/bridge.cpp): computes each job's sums over the
// experts that are not resident, in the model's type.
//
// Data access. Only `submit`, on the callback's thread, reads a job's ids and places: it counts the routing, copies the
// ids of experts that are not resident (the others become -1), and sorts them. The pool's threads then read x, the
// weights, those copied ids and the store. So a late job that is still computed does not read the next step's places.
// Works may share scratch memory: one job is computed at a time, and jobs that
// arrive while a late one is computed fail.
//
// Sums are those of AddRows over the experts that are not resident: float32, in order of expert, rounded once.
#pragma once

#include <map>
#include <utility>

#include "shadow/shadow.h"

namespace umbra {

// The jobs of one layer with one number of tokens.
struct JobWork : ShadowWork {
    Type type;            // of the model
    const uint8_t* live;  // (tokens) 0: the token only pads the step; its experts are neither counted nor computed
    int64_t* counts;      // (experts) += 1 for each pair
    int64_t* hits;        // += 1 for each pair whose expert is resident
    int64_t* times;       // (4) when the pool began and ended, then two zeros; all 0: the pool was not needed
    Job* job = nullptr;
    std::vector<float> weights;

    // rows.x and rows.ids are scratch memory too; rows.elsewhere is not used.
    JobWork(const MoeRows& rows, int64_t layer, std::shared_ptr<void> keep, Type type, const uint8_t* live,
            int64_t* counts, int64_t* hits, int64_t* times)
        : ShadowWork(rows, layer, nullptr, std::move(keep)), type(type), live(live), counts(counts), hits(hits),
          times(times), weights(rows.tokens * rows.k) {}

    // Whether experts are not resident; kNowhere: one is not in the store either.
    enum Missing { kNone, kSome, kNowhere };
    Missing take(Job* job);
    void compute(Context&) override;
    Job* finished() override;
};

class Worker {
public:
    explicit Worker(std::shared_ptr<ShadowPool> pool) : pool_(std::move(pool)) {}

    // Must not be called while a step runs.
    void add(std::shared_ptr<JobWork> work) { works_[{work->layer, work->rows.tokens}] = std::move(work); }

    static int submit(void* worker, Job* job);  // a SubmitJob

private:
    std::shared_ptr<ShadowPool> pool_;
    std::map<std::pair<int64_t, int64_t>, std::shared_ptr<JobWork>> works_;  // by layer and tokens
};

}  // namespace umbra
