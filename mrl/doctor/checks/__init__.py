"""The rules: facts of all hosts -> findings. One small file for each subject; all of them in `CHECKS` of mrl/doctor/judge.py."""
