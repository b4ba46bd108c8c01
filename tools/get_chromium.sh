#!/bin/sh
# get_chromium.sh: headless Chromium for the tests of HTML pages, if it can be had; never fails.
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    echo "Installing chromium with apt-get: the HTML pages are tested in it"
    get='apt-get -qq -y -o Dpkg::Use-Pty=0 -o Acquire::http::Timeout=30 install --no-install-recommends chromium'
    export DEBIAN_FRONTEND=noninteractive
    $get >/dev/null 2>&1 || { apt-get -qq update && $get; } >/dev/null 2>&1
fi
command -v chromium >/dev/null 2>&1 || echo "No Chromium here: the tests of HTML pages in a browser will be skipped"
exit 0
