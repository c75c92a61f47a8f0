# Sourced by demo, test, check and others. Takes two options from their arguments:
#   --newest  the newest versions that uv, else pip, finds in the ranges, in .venv-newest
#   --here    into the environment that is active, whose torch and others this may change
newest='' here='' arguments=()
for argument in "$@"; do
    case $argument in
        --newest) newest=yes ;;
        --here) here=yes ;;
        *) arguments+=("$argument") ;;
    esac
done
set -- "${arguments[@]}"
unset PYTHONDONTWRITEBYTECODE  # as images of containers set it: each process would compile all anew

# A Python that is tested: the machine's own first, since its package settings are made for it.
find_python() {
    local candidate
    for candidate in python3 python python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, ensurepip
assert (3, 11) <= sys.version_info[:2] <= (3, 13)' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python 3.11, 3.12 or 3.13 with venv was found (python3 is" \
        "$(python3 --version 2>/dev/null || echo missing)): install one, such as python3.13 with" \
        "python3.13-venv. Later ones are not tested." >&2
    return 1
}

# prepare EXTRAS: goes to the checkout, activates its .venv, and installs the package with these
# extras, once for each state of pyproject.toml and the constraints.
prepare() {
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    local python stamp site active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} folder=.venv${newest:+-newest}
    if [ -z "$here" ] || [ -z "$active" ]; then
        if [ -n "$active" ] && [ ! "$active" -ef "$folder" ]; then
            echo "$active is active and left as it is: this takes $folder (--here: $active)" >&2
        fi
        if [ ! -x "$folder/bin/python" ]; then
            python=$(find_python)
            "$python" -m venv "$folder"
        fi
        . "$folder/bin/activate"
    fi
    stamp=$(python -c 'import hashlib, os, sys
key = b"".join(open(name, "rb").read() for name in ("pyproject.toml", "tools/constraints.txt"))
key += (os.getcwd() + sys.argv[1]).encode()
print(sys.prefix + "/.moe-qlora-" + hashlib.sha256(key).hexdigest()[:16])' "$1$newest")
    if [ ! -e "$stamp" ]; then
        echo "Installing moe-qlora[$1] into $(dirname "$stamp") (a few minutes the first time)" >&2
        # The machine's own pip settings choose torch's build, and may cap its version; CUDA's is a
        # download of 3 GB.
        if [ -n "$newest" ] && command -v uv >/dev/null; then
            uv pip install -q --upgrade --python "$(command -v python)" -e ".[$1]"
        elif [ -n "$newest" ]; then
            python -m pip install -qq --upgrade --upgrade-strategy eager -e ".[$1]"
        else
            # torch by pip, for these settings; the rest by uv: 36 s together in place of 95.
            local with=(install -q -c tools/constraints.txt)
            python -m pip "${with[@]}" -q --no-compile torch uv
            uv pip "${with[@]}" --python "$(command -v python)" -e ".[$1]" ||
                python -m pip "${with[@]}" -q --no-compile -e ".[$1]"
        fi
        # On every core, since pip compiles on one, and only what a process would take long to compile:
        # others are compiled as they are imported. Templates that are no Python fail.
        site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        python -m compileall -qq -j 0 "$site/torch" "$site/transformers" || true
        python -c 'from moe_qlora.versions import OPTIONAL, REQUIRED, installed_version as installed
print("Installed:", *(f"{one} {installed(one)}," for one in (*REQUIRED, *OPTIONAL) if installed(one)))' >&2
        touch "$stamp"
    fi
}

# find_browser: on CI's machines, which are new and root's own, installs the headless Chromium of
# Debian, in which tests look at pages. Without one, those tests are skipped and say so.
find_browser() {
    local name
    for name in chromium-headless-shell chromium chromium-browser google-chrome; do
        if command -v "$name" >/dev/null; then return; fi
    done
    [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    { timeout 60 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 120 \
        apt-get install -qq -y --no-install-recommends chromium-headless-shell; } >/dev/null 2>&1 ||
        echo "No Chromium could be installed: pages are not looked at." >&2
}
