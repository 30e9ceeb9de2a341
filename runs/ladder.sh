# Functions of the pipeline scripts, which source this file. They set `out`, the output folder; setup.sh sets
# `python`.

refuse() { echo "error: $1" >&2; exit 2; }

refuse_foreign_files() {                 # refuse_foreign_files WHOSE NAME...: if no earlier run left them
    local whose=$1 name; shift
    for name in seconds "$@"; do
        [ ! -e "$out/$name" ] ||
            { [ -f "$out/seconds" ] && ! grep -qvE '^[a-z]+ [0-9.]+ [0-9.]+$' "$out/seconds"; } ||
            refuse "$out/$name is there and not $whose: move it elsewhere, or give another --out_dir=."
    done
}

refuse_other_options() {                 # refuse_other_options FLAGS: if the folder was started with others
    [ ! -e "$out/flags" ] || [ "$(cat "$out/flags")" = "$1" ] ||
        refuse "$out was started with other options, $(cat "$out/flags"): give these, or another --out_dir=."
}

run_python() { "$python" "$@"; }
run_ranks() { env OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone --nproc_per_node="$ranks" "$@"; }

# A small model samples fastest with one process per core; a GPU takes one process.
use_all_cores() {                        # use_all_cores COUNTS: sets per_core (a launcher), device and ask
    per_core=run_python device=
    if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
        local cores
        cores=$("$python" -c "import os
cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
print(max(n for n in ($1) if n <= cores))")                    # COUNTS divide the prompts of a step evenly
        device=--device=cpu
        ask="$ask $device"
        per_core=run_ranks ranks=$cores
    fi
}

now() { "$python" -c "import time; print(time.time())"; }

record_time() {                          # record_time NAME START: append "NAME END START" to $out/seconds
    local end
    end=$(now) && echo "$1 $end $2" >> "$out/seconds"
}
timed() {                                # timed NAME COMMAND...: run it and record its time, even if it fails
    echo; echo "== $1"; local name=$1 start; shift; start=$(now)
    trap "record_time $name $start" EXIT
    "$@"
    trap - EXIT
    record_time "$name" "$start"
}
# stage NAME COMMAND...: timed, unless it has finished before, its output is still there, and no stage before it
# ran now.
stage() {
    local output=$out/$1/model.json
    case $1 in datagen) output=$out/rft.json ;; greedy | sampled | again) output=$out/$1.txt ;; esac
    [ -n "${any_ran:-}" ] || [ ! -e "$out/$1.done" ] || [ ! -e "$output" ] || return 0
    any_ran=yes
    rm -f "$out/$1.done"
    timed "$@"
    touch "$out/$1.done"
}
