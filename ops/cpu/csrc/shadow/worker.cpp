#include "shadow/worker.h"

#include <algorithm>
#include <cstring>

#include "kernels/products.h"
#include "kernels/vector.h"

namespace umbra {

JobWork::Missing JobWork::take(Job* given) {
    job = given;
    step = &job->step;
    std::fill(times, times + 4, 0);
    auto* const ids = const_cast<int64_t*>(rows.ids);
    bool nowhere = false;
    for (int64_t a = 0; a < rows.tokens * rows.k; a++) {
        const int64_t id = job->ids[a], e = id - rows.first_expert;
        const bool here = live[a / rows.k] && e >= 0 && e < rows.experts, missing = here && job->places[e] < 0;
        if (here) counts[e]++;
        *hits += here && !missing;
        nowhere |= missing && rows.address[e] == 0;
        ids[a] = missing ? id : -1;
    }
    return nowhere ? kNowhere : rows.sort() ? kSome : kNone;
}

void JobWork::compute(Context& context) {
    auto* const floats = const_cast<float*>(rows.x);  // holds x first, then the sums
    const int64_t hidden = rows.hidden;
    with_type(type, [&](auto zero) {
        using T = decltype(zero);
        each_row(context, rows.tokens, [&](int64_t t) {
            const T* from = static_cast<const T*>(job->x) + t * hidden;
            for (int64_t i = 0; i < hidden; i++) floats[t * hidden + i] = widen(from[i]);
        });
        rows.compute(context);
        const T* given = static_cast<const T*>(job->weights);
        for (size_t a = 0; a < weights.size(); a++) weights[a] = widen(given[a]);
        AddRows{rows.rows, weights.data(), rows.ids,          floats, rows.tokens,
                rows.k,    rows.experts,   rows.first_expert, hidden}
            .run(context);
        each_row(context, rows.tokens, [&](int64_t t) {
            T* to = static_cast<T*>(job->sums) + t * hidden;
            for (int64_t i = 0; i < hidden; i++) to[i] = narrow<T>(floats[t * hidden + i]);
        });
    });
}

Job* JobWork::finished() {
    times[0] = began;
    times[1] = ended;
    return job;
}

int Worker::submit(void* context, Job* job) {
    Worker& worker = *static_cast<Worker*>(context);
    const auto found = worker.works_.find({job->layer, job->tokens});
    if (found == worker.works_.end()) return 1;
    const std::shared_ptr<JobWork>& work = found->second;
    if (job->top_k != work->rows.k || job->hidden != work->rows.hidden) return 1;
    if (!worker.pool_->idle()) return job->done(job, 1), 0;
    switch (work->take(job)) {
        case JobWork::kNone:
            with_type(work->type,
                      [&](auto zero) { std::memset(job->sums, 0, job->tokens * job->hidden * sizeof zero); });
            job->done(job, 0);
            break;
        case JobWork::kSome:
            if (!worker.pool_->submit(work)) job->done(job, 1);
            break;
        case JobWork::kNowhere: job->done(job, 1);
    }
    return 0;
}

}  // namespace umbra
