export PYTHONPATH=src
(timeout 330 python3 -u benchmarks/cuda_checks.py > $OUT/checks.txt 2>&1; echo rc $? >> $OUT/checks.txt)
timeout 60 python3 -u benchmarks/_explore.py > $OUT/explore.txt 2>&1
tail -c 7000 $OUT/checks.txt; tail -c 3500 $OUT/explore.txt
