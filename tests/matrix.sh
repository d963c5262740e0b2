#!/usr/bin/env bash
# The test suite under several versions of Python, PyTorch and numpy, one virtual environment each.
#
#     tests/matrix.sh [FOLDER]        # the environments are made there, 3 to 6 GB each, and kept
#
# Needs the Pythons as python3.8, ... on the PATH, or from pyenv; a row whose Python is missing is
# skipped and said. PyTorch 1.13 is not among them: its torch.load(weights_only=True) reads no
# floats, so that --resume fails there.
set -u
cd "$(dirname "$0")/.."
folder=${1:-$(mktemp -d)}
export OMP_NUM_THREADS=1

find_python() {
  "python$1" -c "" 2>/dev/null && command -v "python$1" || ls "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python 2>/dev/null | tail -n 1
}

failed=0
while read -r version packages; do
  name="Python $version, $packages"
  python=$(find_python "$version")
  if [ -z "$python" ]; then
    echo "SKIPPED  $name: no Python $version"
    continue
  fi
  env="$folder/$(echo "$version $packages" | tr -cs 'a-z0-9.\n' '-')"
  [ -d "$env" ] || "$python" -m venv "$env"
  # shellcheck disable=SC2086
  if "$env/bin/python" -m pip install -q $packages -r tests/requirements.txt >"$env/pip.log" 2>&1 &&
    "$env/bin/python" -m pytest tests -q >"$env/pytest.log" 2>&1; then
    result=PASSED
  else
    result=FAILED
    failed=1
  fi
  echo "$result   $name: $(tail -n 1 "$env/pytest.log" 2>/dev/null) ($env)"
done <<'ROWS'
3.8 torch==2.0.1 torchvision==0.15.2 numpy<2
3.10 torch==2.2.2 torchvision==0.17.2 numpy<2
3.9 torch==2.8.0 torchvision==0.23.0 numpy>=2
3.13 torch torchvision numpy>=2
ROWS
exit $failed
