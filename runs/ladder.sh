# What the ladders of this folder share; they source it. `out` is their folder, and `python` is known after setup.sh.

refuse() { echo "error: $1" >&2; exit 2; }

ours_or_none() {                         # ours_or_none WHOSE NAME...: an earlier ladder is known by its file of seconds; without it, nothing is replaced
    local whose=$1 name; shift
    for name in seconds "$@"; do
        [ ! -e "$out/$name" ] ||
            { [ -f "$out/seconds" ] && ! grep -qvE '^[a-z]+ [0-9.]+ [0-9.]+$' "$out/seconds"; } ||
            refuse "$out/$name is there and not $whose: move it elsewhere, or give another --out_dir=."
    done
}

# So small a model is sampled fastest by a process for each core; a GPU takes one.
spread() {                               # spread NUMBERS: sets each_core, so many processes of them as there are cores, and device; adds that to ask
    each_core="$python" device=
    if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
        local cores
        cores=$("$python" -c "import os
cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
print(max(n for n in ($1) if n <= cores))")                        # they share the prompts of a step evenly
        device=--device=cpu
        ask="$ask $device"
        each_core="env OMP_NUM_THREADS=1 $python -m torch.distributed.run --standalone --nproc_per_node=$cores"
    fi
}

now() { "$python" -c "import time; print(time.time())"; }

noted() {                                # noted NAME BEGAN: a line in the file of seconds, if the time can be told
    local ended
    ended=$(now) && echo "$1 $ended $2" >> "$out/seconds"
}
timed() {                                # timed NAME COMMAND...: notes the seconds that a stage takes, also of one that fails or is stopped
    echo; echo "== $1"; local name=$1 began; shift; began=$(now)
    trap "noted $name $began" EXIT
    "$@"
    trap - EXIT
    noted "$name" "$began"
}
once() {                                 # once NAME FILE COMMAND...: timed, unless FILE is there
    local name=$1 file=$2; shift 2
    [ -e "$file" ] || timed "$name" "$@"
}

finish() {                               # finish NAME COMMAND...: timed, unless it came to its end before
    [ ! -e "$out/$1.done" ] || return 0
    timed "$@"
    touch "$out/$1.done"
}
