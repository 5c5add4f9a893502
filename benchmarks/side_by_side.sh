#!/usr/bin/env bash
# The same comparison and the same sweep with two versions of Shoal, in turns on one machine.
# Needs SHOAL_DATA with heart_disease/. Usage: side_by_side.sh PYTHON OLD_SRC NEW_SRC; the old one has the option names of before version 0.3.
set -eu
python=$1 old=$2 new=$3 out=$(mktemp -d)
cd "$out"
export OMP_NUM_THREADS=1
timed() { # name, source folder, arguments
  local name=$1 source=$2 began ended
  shift 2
  began=$(date +%s.%N)
  PYTHONPATH=$source "$python" -m shoal "$@" --out "$out/$name" >"$out/$name.txt" 2>&1
  ended=$(date +%s.%N)
  echo "$name $(echo "$ended - $began" | bc)"
}
heart=(--algorithms erm fish --seeds 2 --search 2 --steps 100 --device cpu)
linear=(--data per_domain=100 --algorithms erm fish --steps 100 --eval-every 20 --device cpu)
for n in 1 2; do
  timed "heart-old-$n" "$old" compare heart "${heart[@]}"
  timed "heart-new-$n" "$new" compare heart "${heart[@]}"
  timed "sweep-old-$n" "$old" sweep --datasets linear "${linear[@]}" --trials 2 --hparams 17
  timed "sweep-new-$n" "$new" sweep linear "${linear[@]}" --seeds 2 --search 17
done
for n in 1 2; do
  diff <(sort "$out/heart-old-$n/compare-heart.csv") <(sort "$out/heart-new-$n/compare-heart.csv") >/dev/null &&
    echo "heart $n: the same rows"
done
rm -rf "$out"
