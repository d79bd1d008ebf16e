/* A driver's libnvidia-ml.so.1 with three unlike GPUs, for tests on machines that have none.

What it answers is in the global variable `state`, which conftest.py sets. Version 1 of the memory
query counts the driver's reserve as used, so an answer shows which version was asked. */

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum {
    SUCCESS = 0,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    FUNCTION_NOT_FOUND = 13,
    VERSION_MISMATCH = 25,
};

#define NUM_BOARDS 3
#define NUM_SLICES 2
#define NUM_UNITS (NUM_BOARDS + NUM_SLICES)
#define GIB (1ull << 30)

struct {
    uint64_t used[NUM_UNITS];      /* bytes, the driver's reserve left out */
    uint64_t reserved;             /* bytes, of each unit */
    uint32_t memory_error[NUM_UNITS];
    uint32_t handle_error[NUM_BOARDS];
    uint32_t init_error;
    uint32_t name_error;
    uint32_t has_mig;              /* board 1 is split into two slices */
    uint32_t is_before_510;        /* has no version 2 of the memory query */
    uint32_t num_memory_queries;
} state;

struct unit {
    const char *name, *uuid;
    uint64_t total;
    uint32_t bus;
};

static struct unit units[NUM_UNITS] = {
    {"NVIDIA GeForce GTX 1080 Ti", "GPU-5a1f0c55-11d2-4e7a-9a31-3c0b6f0d2a01", 11 * GIB, 0x04},
    {"NVIDIA A100-SXM4-40GB", "GPU-5a2e9b10-72c4-4b5f-8d11-90e2c4a1b702", 40 * GIB, 0x07},
    {"NVIDIA H100 80GB HBM3", "GPU-c3b7d6e4-0f5a-4c88-b2f0-6a7d1e9c5403", 80 * GIB, 0x0b},
    {"NVIDIA A100-SXM4-40GB MIG 3g.20gb", "MIG-0d4b8f21-5e6c-5a9b-8c7d-1f2e3d4c5b06", 20 * GIB, 0x07},
    {"NVIDIA A100-SXM4-40GB MIG 2g.10gb", "MIG-e7a6b5c4-3d2e-5f1a-9b8c-7d6e5f4a3b07", 10 * GIB, 0x07},
};

static int index_of(const struct unit *unit)
{
    return (int)(unit - units);
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return (int)state.init_error;
}

int nvmlShutdown(void)
{
    return SUCCESS;
}

const char *nvmlErrorString(int error)
{
    (void)error;
    return "an error of the stand-in";
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = NUM_BOARDS;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct unit **handle)
{
    if (index >= NUM_BOARDS)
        return INVALID_ARGUMENT;
    *handle = &units[index];
    return (int)state.handle_error[index];
}

int nvmlDeviceGetMaxMigDeviceCount(struct unit *unit, unsigned *count)
{
    *count = state.has_mig && index_of(unit) == 1 ? 7 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct unit *unit, unsigned index, struct unit **handle)
{
    if (index_of(unit) != 1 || index >= NUM_SLICES)
        return NOT_FOUND;
    *handle = &units[NUM_BOARDS + index];
    return SUCCESS;
}

int nvmlDeviceGetName(struct unit *unit, char *name, unsigned size)
{
    snprintf(name, size, "%s", unit->name);
    return (int)state.name_error;
}

int nvmlDeviceGetUUID(struct unit *unit, char *uuid, unsigned size)
{
    snprintf(uuid, size, "%s", unit->uuid);
    return SUCCESS;
}

struct pci_info {
    char legacy[16];
    uint32_t domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(struct unit *unit, struct pci_info *info)
{
    memset(info, 0, sizeof *info);
    info->bus = unit->bus;
    return SUCCESS;
}

static int count_query(const struct unit *unit)
{
    state.num_memory_queries++;
    return (int)state.memory_error[index_of(unit)];
}

struct memory_v1 {
    uint64_t total, free, used;
};

int nvmlDeviceGetMemoryInfo(struct unit *unit, struct memory_v1 *memory)
{
    memory->total = unit->total;
    memory->used = state.used[index_of(unit)] + state.reserved;
    memory->free = memory->total - memory->used;
    return count_query(unit);
}

struct memory_v2 {
    uint32_t version;
    uint64_t total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(struct unit *unit, struct memory_v2 *memory)
{
    if (state.is_before_510)
        return FUNCTION_NOT_FOUND;
    if (memory->version != (sizeof *memory | 2u << 24))
        return VERSION_MISMATCH;
    memory->total = unit->total;
    memory->used = state.used[index_of(unit)];
    memory->reserved = state.reserved;
    memory->free = memory->total - memory->used - memory->reserved;
    return count_query(unit);
}
