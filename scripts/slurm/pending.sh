#!/usr/bin/env bash
# Says why jobs of yours wait, when SLURM means to start them, and what to do.
#
#   bash scripts/slurm/pending.sh [job id ...]        default: all that wait
set -euo pipefail
case "${1:-}" in
    -h | --help) sed -n '2,${/^#/!q;s/^# \{0,1\}//p;}' "$0" && exit ;;
esac

advice() {    # SLURM's reason, as squeue prints it -> what to do
    case "$1" in
        None | Priority) echo "others are before it; less --time or fewer --nodes may start it earlier" ;;
        Resources) echo "nodes are busy: ask for fewer --nodes or GPUs, less --time, or another --partition (sinfo)" ;;
        *ReqNodeNotAvail* | *NodeDown* | *Reserv*) echo "nodes are down or reserved until later: scontrol show reservation" ;;
        PartitionNodeLimit | PartitionTimeLimit | PartitionDown | PartitionInactive)
            echo "the partition does not give that: compare --nodes and --time with sinfo -o '%P %l %D %G'" ;;
        BadConstraints | *PartitionConfig*) echo "no node has what is asked for: GPUs, memory, features; cancel it, ask for less" ;;
        *QOS*Limit* | *QOSMax* | *QOSGrp* | *Assoc*Limit* | *AssocGrp* | *AssocMax*)
            echo "a limit of your account or QOS is reached: it starts when other jobs end; sacctmgr show assoc user=$USER" ;;
        Dependency | DependencyNeverSatisfied) echo "it waits for another job: scontrol show job, Dependency=" ;;
        BeginTime) echo "it was put off, as after a requeue: it starts at the time named" ;;
        JobHeld*) echo "it is held: scontrol release <job id>, or ask the administrators" ;;
        *Licenses*) echo "licences are in use" ;;
        *) echo "see the reasons in man squeue" ;;
    esac
}

USER="${USER:-$(id -un)}" found=false
chosen=(--user "$USER" --states=PENDING)
[ $# -eq 0 ] || chosen=(--jobs "$(IFS=,; echo "$*")" --states=all)
jobs="$(squeue --noheader --format='%i|%T|%D|%P|%S|%r' "${chosen[@]}")"
while IFS='|' read -r job state nodes partition start reason; do
    [ -n "$job" ] || continue
    found=true
    if [ "$state" != PENDING ]; then
        echo "job $job: $state on $partition, it does not wait"
        continue
    fi
    [ "$start" != N/A ] || start="not known yet"
    echo "job $job ($nodes nodes of $partition) waits: $reason; expected to start: $start. $(advice "$reason")"
done <<<"$jobs"
$found || echo "no job of that kind is in the queue"
