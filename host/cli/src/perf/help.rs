//! The text below the options of `sumac perf --help`.

/// Examples, names, formats and exit statuses.
pub(crate) const HELP: &str = "\
EXAMPLES
  sumac perf
  sumac perf -b 1K -e 64M -f 4 -n 50 --algo tree,ring
  sumac perf -b 1M -e 8M -i 1M --buffers in-place --csv > rows.csv
  sumac perf --levels 1 --ranks 8 -d bf16 -o max
  sumac perf --collective reduce-scatter,all-gather,barrier --algo tree,auto
  sumac perf --collective broadcast -r all -d all -e 4K --quiet
  sumac perf --explain --algo auto --order fold -b 8 -e 16M
  sumac perf --topology fabric.ibnetdiscover --ranks 16
  sumac perf --transport udp --algo tree
  sumac perf --fault kill-device -b 1M -e 16M --algo tree
  mpirun -np 64 sumac perf --controller head:7847
  sumac run -n 4 -- sumac perf
  sumac perf --ssh n1:8,n2:8 --controller head:7847

LAUNCHERS
  Started by torchrun, mpirun, srun or `sumac run`, perf is one rank of a job on a running controller, as nccl-tests
  are. Rank 0 prints the rows, with the figures of all ranks, and all ranks exit with the same status. Give all ranks
  the same options. devices are those of the job's tree. --ranks starts a cluster here all the same. Without a launcher,
  --ssh starts the ranks, those of a host one after the other, and ends them when it ends.

NCCL-TESTS
  -b -e -i -f -n -w -d -o -r are those of nccl-tests (its README, \"Arguments\"), with other defaults for sizes; -c 1 is
  -c ends, and there is no -c 0. Type names of nccl-tests stand for those here: int8 uint8 int32 uint32 int64 uint64 half
  float double bfloat16; so does the operator mulsum for premul_sum. Names take hyphens or underscores. As there, each row
  is measured out of place, then in place, the root of collectives without one is -1, and the last line is the mean of
  all bus bandwidths in GB/s. time is a median over the iterations, not a mean: of the slowest rank in each. min, avg and
  max over the ranks, for which nccl-tests has -a, are those of each rank's own median. A barrier has the algorithms tree,
  dissemination, one-shot and auto, which it also takes for others.

JSON AND CSV
  One object, or one line, per row. --csv prints the same keys as its first line, and an empty cell for null.
  Figures: collective dtype op ranks size_bytes count algo path transport time_us p99_us algbw_gbytes_s busbw_gbytes_s
  wrong wire_bytes cpu_us retransmits repaired repair_bytes slowest_rank late_us root in_place rank_min_us rank_avg_us
  rank_max_us out_of_place_time_us out_of_place_p99_us out_of_place_algbw_gbytes_s out_of_place_busbw_gbytes_s
  out_of_place_wrong trees.
  Conditions: iterations warmup_iterations check buffers memory order requested_transport wait_policy levels devices
  emulated_devices shards bind cores version command.
  Figures are in place where in_place is true, else out of place; those that begin with out_of_place are null unless
  measured. rank_min_us, rank_avg_us and rank_max_us are the least, the mean and the greatest of the ranks' own
  medians.
  wire_bytes and cpu_us are maxima over ranks, per operation; cpu_us is measured in a quarter as many further
  iterations. repair_bytes is the maximum that one rank sent for recovery. wrong and retransmits are sums over ranks and iterations, in place and out of place. op is null for
  collectives that do not reduce, root for those without one; dtype and in_place are also null for a barrier. path is
  the algorithm that ran, and mixed if ranks or placements differ. transport is how ranks reach the tree: shm, udp,
  verbs, rdma or mixed; on other paths it is host. trees is how many trees each operation was spread over at least.
  command repeats the run.
  With --explain: operation requested overridden chosen transport candidates[{path cost_us ruled_out}] costs;
  transport is null where there is no tree, and costs is where the costs come from.

PROGRESS
  Stderr names the controller of the run, to watch it with `sumac status`; the table names it above its header. If
  stdout is no terminal, a row that takes more than 3 s prints a line on stderr then and every 10 s. --quiet drops all
  of this, the conditions and the summary.

FAULTS
  kill-device, restart-device and cut-link take rank 0's leaf device, or the link to it, out of the tree. The ranks
  complete the operations in flight among themselves, and repaired is true. In rows that use a host collective, that may
  be the next barrier. A dead device is detected through shared memory or, a second later, through its connection to the
  controller. A cut link loses packets only and is detected after 5 s.

  kill-controller affects no operation. After restart-controller, the ranks report their job to the new controller and
  later migrate to a tree that it plans; nothing is recovered. kill-rank ends the run: the other ranks report which rank
  failed.

EXIT STATUS
  0 all elements correct; 1 wrong elements, a failed run or a killed rank; 2 invalid usage or topology;
  130 interrupted";
