/* A hash map from byte strings to 64-bit values: open addressing, linear probing, power-of-two
 * capacity, tombstone-free deletion by shifting back. */

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAP_MIN_CAPACITY 16u

struct map_entry {
    char *key;
    size_t key_len;
    uint64_t hash;
    int64_t value;
};

struct map {
    struct map_entry *entries;
    size_t capacity;
    size_t count;
};

static uint64_t fnv1a(const char *data, size_t len)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < len; i++) {
        hash ^= (unsigned char)data[i];
        hash *= 0x100000001b3ull;
    }
    return hash;
}

int map_init(struct map *map)
{
    map->entries = calloc(MAP_MIN_CAPACITY, sizeof(*map->entries));
    if (map->entries == NULL)
        return -ENOMEM;
    map->capacity = MAP_MIN_CAPACITY;
    map->count = 0;
    return 0;
}

void map_free(struct map *map)
{
    for (size_t i = 0; i < map->capacity; i++)
        free(map->entries[i].key);
    free(map->entries);
    memset(map, 0, sizeof(*map));
}

static size_t find_slot(const struct map *map, const char *key, size_t len, uint64_t hash)
{
    size_t mask = map->capacity - 1;
    size_t slot = hash & mask;

    while (map->entries[slot].key != NULL) {
        const struct map_entry *entry = &map->entries[slot];
        if (entry->hash == hash && entry->key_len == len && memcmp(entry->key, key, len) == 0)
            break;
        slot = (slot + 1) & mask;
    }
    return slot;
}

static int grow(struct map *map)
{
    struct map bigger = { .capacity = map->capacity * 2, .count = map->count };

    if (bigger.capacity < map->capacity)
        return -EOVERFLOW;
    bigger.entries = calloc(bigger.capacity, sizeof(*bigger.entries));
    if (bigger.entries == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < map->capacity; i++) {
        struct map_entry *entry = &map->entries[i];
        if (entry->key == NULL)
            continue;
        size_t slot = find_slot(&bigger, entry->key, entry->key_len, entry->hash);
        bigger.entries[slot] = *entry;
    }
    free(map->entries);
    *map = bigger;
    return 0;
}

int map_set(struct map *map, const char *key, size_t len, int64_t value)
{
    uint64_t hash = fnv1a(key, len);
    size_t slot;

    if ((map->count + 1) * 4 > map->capacity * 3) {
        int error = grow(map);
        if (error)
            return error;
    }
    slot = find_slot(map, key, len, hash);
    if (map->entries[slot].key == NULL) {
        char *copy = malloc(len + 1);
        if (copy == NULL)
            return -ENOMEM;
        memcpy(copy, key, len);
        copy[len] = '\0';
        map->entries[slot] = (struct map_entry){ .key = copy, .key_len = len, .hash = hash };
        map->count++;
    }
    map->entries[slot].value = value;
    return 0;
}

bool map_get(const struct map *map, const char *key, size_t len, int64_t *value)
{
    size_t slot = find_slot(map, key, len, fnv1a(key, len));

    if (map->entries[slot].key == NULL)
        return false;
    if (value != NULL)
        *value = map->entries[slot].value;
    return true;
}

bool map_remove(struct map *map, const char *key, size_t len)
{
    size_t mask = map->capacity - 1;
    size_t hole = find_slot(map, key, len, fnv1a(key, len));

    if (map->entries[hole].key == NULL)
        return false;
    free(map->entries[hole].key);
    for (size_t next = (hole + 1) & mask; map->entries[next].key != NULL; next = (next + 1) & mask) {
        size_t home = map->entries[next].hash & mask;
        /* Move the entry back unless its home lies cyclically in (hole, next]. */
        if (((next - home) & mask) >= ((next - hole) & mask)) {
            map->entries[hole] = map->entries[next];
            hole = next;
        }
    }
    memset(&map->entries[hole], 0, sizeof(map->entries[hole]));
    map->count--;
    return true;
}

/* Counts the words of standard input and prints the ten most frequent. */

struct count {
    const char *word;
    int64_t times;
};

static int by_times_descending(const void *a, const void *b)
{
    const struct count *x = a, *y = b;
    if (x->times != y->times)
        return x->times < y->times ? 1 : -1;
    return strcmp(x->word, y->word);
}

int main(void)
{
    struct map words;
    char buffer[256];
    int status = EXIT_SUCCESS;

    if (map_init(&words) != 0) {
        fprintf(stderr, "out of memory\n");
        return EXIT_FAILURE;
    }
    while (scanf("%255s", buffer) == 1) {
        int64_t times = 0;
        size_t len = strlen(buffer);
        map_get(&words, buffer, len, &times);
        if (map_set(&words, buffer, len, times + 1) != 0) {
            fprintf(stderr, "out of memory after %zu words\n", words.count);
            status = EXIT_FAILURE;
            goto out;
        }
    }
    struct count *counts = malloc((words.count ? words.count : 1) * sizeof(*counts));
    if (counts == NULL) {
        status = EXIT_FAILURE;
        goto out;
    }
    size_t used = 0;
    for (size_t i = 0; i < words.capacity; i++)
        if (words.entries[i].key != NULL)
            counts[used++] = (struct count){ words.entries[i].key, words.entries[i].value };
    qsort(counts, used, sizeof(*counts), by_times_descending);
    for (size_t i = 0; i < used && i < 10; i++)
        printf("%8lld  %s\n", (long long)counts[i].times, counts[i].word);
    free(counts);
out:
    map_free(&words);
    return status;
}
