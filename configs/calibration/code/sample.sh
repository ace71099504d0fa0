#!/usr/bin/env bash
# Nightly backup: one compressed archive per directory, checksums, the seven newest kept.
set -euo pipefail

readonly TARGET="${BACKUP_TARGET:-/var/backups/nightly}"
readonly KEEP="${BACKUP_KEEP:-7}"
readonly LOCK="$TARGET/.lock"

usage() {
    cat <<EOF
usage: ${0##*/} [-n] DIRECTORY...
  -n    say what would be done, do nothing
EOF
}

log() { printf '%s %s\n' "$(date -u +%FT%TZ)" "$*" >&2; }

die() {
    log "error: $*"
    exit 1
}

dry_run=0
while getopts ':nh' option; do
    case "$option" in
        n) dry_run=1 ;;
        h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[[ $# -gt 0 ]] || { usage >&2; exit 2; }

mkdir -p "$TARGET"
exec 9>"$LOCK"
flock -n 9 || die "another backup is running"

cleanup() {
    rm -f -- "$TARGET"/*.partial
}
trap cleanup EXIT INT TERM

free_kib=$(df --output=avail "$TARGET" | tail -n 1)
for directory in "$@"; do
    [[ -d "$directory" ]] || die "$directory: not a directory"
    need_kib=$(du -sk -- "$directory" | cut -f1)
    if ((need_kib > free_kib)); then
        die "$directory: needs $need_kib KiB, only $free_kib KiB are free"
    fi
    name="$(basename "$directory")-$(date +%Y%m%d).tar.zst"
    if ((dry_run)); then
        log "would write $TARGET/$name"
        continue
    fi
    tar --create --directory "$(dirname "$directory")" "$(basename "$directory")" |
        zstd --quiet -T0 -10 -o "$TARGET/$name.partial"
    mv -- "$TARGET/$name.partial" "$TARGET/$name"
    (cd "$TARGET" && sha256sum -- "$name" >"$name.sha256")
    log "wrote $name ($(stat -c %s "$TARGET/$name") bytes)"
    mapfile -t old < <(ls -1t "$TARGET/$(basename "$directory")"-*.tar.zst | tail -n +$((KEEP + 1)))
    for file in "${old[@]}"; do
        rm -f -- "$file" "$file.sha256"
    done
done

find "$TARGET" -name '*.sha256' -mtime -1 -print0 |
    while IFS= read -r -d '' sums; do
        (cd "$TARGET" && sha256sum --quiet --check "$sums") || log "warning: $sums does not match"
    done

awk -F'\t' '$3 ~ /^[0-9]+$/ { total[$1] += $3 } END { for (k in total) printf "%-20s %12d\n", k, total[k] }' \
    "${STATS_FILE:-/dev/null}" | sort -k2,2nr | head -n 20
sed -E -e 's/^[[:space:]]+//' -e '/^(#|$)/d' /etc/fstab | grep -c 'ext4' || true
