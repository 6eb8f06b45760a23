/* Stands in for libnvidia-ml.so.1: the part of NVML that the agent asks for, told from a file.

   NVML_STAND_IN names the file. It is read again at each count of the cards, so that cards may come and go.
   A line is a device, its fields apart by tabs; a line that begins with "slice" belongs to the card above it:

     card|slice  name  uuid  total bytes  used bytes  MIG mode  row failure  recovery action  code  pages  errors
     processes

   total, MIG mode, row failure, recovery action, pages (that are to be retired), errors (that were not corrected):
   -1 is "not supported". code: what the
   card itself answers instead of everything (0: it is well; 15: lost). processes: pid:bytes:kind,... where kind
   is c (computes) or g (draws) and -1 bytes are "not available"; "?" is "not supported".
   A file that cannot be read is a driver that is not loaded. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, UNINITIALIZED, INVALID, NOT_SUPPORTED, NOT_FOUND = 6, TOO_SMALL, NO_DRIVER = 9 };

typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, code;
    union { double d; unsigned u; unsigned long long ull; } value;
} field_t;

typedef struct device {
    int is_slice, mig_mode, row_failure, recovery, code, pages;
    char name[96], uuid[96], processes[512];
    long long total, used, errors;
    struct device *slices[8];
    unsigned slice_count;
} device_t;

static device_t devices[64];
static device_t *cards[32];
static unsigned card_count;

static int load(void) {
    FILE *file = fopen(getenv("NVML_STAND_IN") ? getenv("NVML_STAND_IN") : "", "r");
    char line[1024], kind[8];
    unsigned count = 0;
    card_count = 0;
    if (!file) return NO_DRIVER;
    while (count < 64 && fgets(line, sizeof line, file)) {
        device_t *d = &devices[count];
        memset(d, 0, sizeof *d);
        if (sscanf(line, "%7[^\t]\t%95[^\t]\t%95[^\t]\t%lld\t%lld\t%d\t%d\t%d\t%d\t%d\t%lld\t%511[^\n]", kind,
                   d->name, d->uuid, &d->total, &d->used, &d->mig_mode, &d->row_failure, &d->recovery,
                   &d->code, &d->pages, &d->errors, d->processes) < 11)
            continue;
        count++;
        d->is_slice = strcmp(kind, "slice") == 0;
        if (!d->is_slice) cards[card_count++] = d;
        else if (card_count) cards[card_count - 1]->slices[cards[card_count - 1]->slice_count++] = d;
    }
    fclose(file);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return load(); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "an error"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = load();
    *count = card_count;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device) {
    if (index >= card_count) return INVALID;
    *device = cards[index];
    return cards[index]->code;
}

int nvmlDeviceGetName(device_t *d, char *name, unsigned length) {
    snprintf(name, length, "%s", d->name);
    return d->code;
}

int nvmlDeviceGetUUID(device_t *d, char *uuid, unsigned length) {
    snprintf(uuid, length, "%s", d->uuid);
    return d->code;
}

int nvmlDeviceGetMemoryInfo(device_t *d, memory_t *memory) {
    if (d->total < 0) return NOT_SUPPORTED;
    memory->total = d->total;
    memory->used = d->used;
    memory->free = d->total - d->used;
    return d->code;
}

int nvmlDeviceGetMigMode(device_t *d, unsigned *current, unsigned *pending) {
    if (d->mig_mode < 0) return NOT_SUPPORTED;
    *current = *pending = d->mig_mode;
    return d->code;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t *d, unsigned *count) {
    *count = 7;
    return d->code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t *d, unsigned index, device_t **slice) {
    if (index >= d->slice_count) return NOT_FOUND;
    *slice = d->slices[index];
    return d->code;
}

int nvmlDeviceGetRemappedRows(device_t *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failure) {
    if (d->row_failure < 0) return NOT_SUPPORTED;
    *corrected = *uncorrected = *pending = 0;
    *failure = d->row_failure;
    return d->code;
}

int nvmlDeviceGetRetiredPagesPendingStatus(device_t *d, int *pending) {
    if (d->pages < 0) return NOT_SUPPORTED;
    *pending = d->pages;
    return d->code;
}

int nvmlDeviceGetTotalEccErrors(device_t *d, int type, int counter, unsigned long long *count) {
    if (d->errors < 0 || type != 1 || counter != 0) return NOT_SUPPORTED;
    *count = d->errors;
    return d->code;
}

int nvmlDeviceGetFieldValues(device_t *d, int count, field_t *fields) {
    for (int i = 0; i < count; i++) {
        fields[i].code = d->recovery < 0 || fields[i].field != 230 ? NOT_SUPPORTED : SUCCESS;
        fields[i].type = 1;
        fields[i].value.u = d->recovery;
    }
    return d->code;
}

static int tell_processes(device_t *d, char wanted, unsigned *count, process_t *found) {
    unsigned room = *count, here = 0, pid;
    long long used;
    char kind, text[512], *rest = text, *part;
    if (strcmp(d->processes, "?") == 0) return NOT_SUPPORTED;
    strcpy(text, d->processes);
    while ((part = strsep(&rest, ","))) {
        if (sscanf(part, "%u:%lld:%c", &pid, &used, &kind) != 3 || kind != wanted) continue;
        if (found && here < room) found[here] = (process_t){pid, (unsigned long long)used, ~0u, ~0u};
        here++;
    }
    *count = here;
    return here > room ? TOO_SMALL : d->code;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t *d, unsigned *count, process_t *found) {
    return tell_processes(d, 'c', count, found);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t *d, unsigned *count, process_t *found) {
    return tell_processes(d, 'g', count, found);
}
