/* A plugin for qemu-user that prints how many instructions the program ran. QEMU's own header is not packaged, so the
 * few declarations needed stand here; they are the same in every plugin API, whose number is API below. */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb; /* a straight run of instructions */
struct qemu_info_t;
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb*, void (*)(unsigned, void*), int flags, void* data);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, void*), void* data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);

int qemu_plugin_version = API;

static uint64_t total; /* the counted programs have one thread */

static void executed(unsigned cpu, void* instructions) {
    (void)cpu;
    total += (uintptr_t)instructions;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb* tb) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_cb(tb, executed, 0, (void*)(uintptr_t)qemu_plugin_tb_n_insns(tb));
}

static void finished(qemu_plugin_id_t id, void* data) {
    (void)id, (void)data;
    fprintf(stderr, "instructions %" PRIu64 "\n", total);
}

int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info_t* info, int argc, char** argv) {
    (void)info, (void)argc, (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, finished, NULL);
    return 0;
}
