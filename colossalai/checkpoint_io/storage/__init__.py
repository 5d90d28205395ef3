"""Files on disk: replaced as a whole, summed, listed, locked, validated, written in the background.

For users: `atomic_file`, `atomic_folder`, `check_saves`, `wait_for_saves`, by the face of `checkpoint_io`.
The rest is of this package.
"""

from colossalai.checkpoint_io.storage._async_save import HostCopies as HostCopies
from colossalai.checkpoint_io.storage._async_save import check_saves as check_saves
from colossalai.checkpoint_io.storage._async_save import host_copies as host_copies
from colossalai.checkpoint_io.storage._async_save import locked as locked
from colossalai.checkpoint_io.storage._async_save import start_save as start_save
from colossalai.checkpoint_io.storage._async_save import wait_for_saves as wait_for_saves
from colossalai.checkpoint_io.storage._atomic import Write as Write
from colossalai.checkpoint_io.storage._atomic import atomic_file as atomic_file
from colossalai.checkpoint_io.storage._atomic import atomic_folder as atomic_folder
from colossalai.checkpoint_io.storage._atomic import clear_os_errors as clear_os_errors
from colossalai.checkpoint_io.storage._atomic import staged as staged
from colossalai.checkpoint_io.storage._atomic import write_shared_folder as write_shared_folder
from colossalai.checkpoint_io.storage._file_blocks import DEFAULT_BUFFER_MB as DEFAULT_BUFFER_MB
from colossalai.checkpoint_io.storage._file_blocks import WRITTEN as WRITTEN
from colossalai.checkpoint_io.storage._file_blocks import Checksum as Checksum
from colossalai.checkpoint_io.storage._file_blocks import aligned_blocks as aligned_blocks
from colossalai.checkpoint_io.storage._file_blocks import block_size as block_size
from colossalai.checkpoint_io.storage._file_blocks import bytes_of as bytes_of
from colossalai.checkpoint_io.storage._file_blocks import file_blocks as file_blocks
from colossalai.checkpoint_io.storage._file_blocks import flat_bytes as flat_bytes
from colossalai.checkpoint_io.storage._file_blocks import read_block_size as read_block_size
from colossalai.checkpoint_io.storage._manifest import FORM_OF_FILES as FORM_OF_FILES
from colossalai.checkpoint_io.storage._manifest import INDEX as INDEX
from colossalai.checkpoint_io.storage._manifest import MANIFEST as MANIFEST
from colossalai.checkpoint_io.storage._manifest import MODEL_FOLDER as MODEL_FOLDER
from colossalai.checkpoint_io.storage._manifest import OPTIMIZER_FOLDER as OPTIMIZER_FOLDER
from colossalai.checkpoint_io.storage._manifest import RANDOM_FOLDER as RANDOM_FOLDER
from colossalai.checkpoint_io.storage._manifest import SMALL_FILE as SMALL_FILE
from colossalai.checkpoint_io.storage._manifest import FileEntry as FileEntry
from colossalai.checkpoint_io.storage._manifest import Manifest as Manifest
from colossalai.checkpoint_io.storage._manifest import file_entries as file_entries
from colossalai.checkpoint_io.storage._manifest import first_misfit as first_misfit
from colossalai.checkpoint_io.storage._manifest import random_file as random_file
from colossalai.checkpoint_io.storage._manifest import read_manifest as read_manifest
from colossalai.checkpoint_io.storage._manifest import share_of_files as share_of_files
from colossalai.checkpoint_io.storage._manifest import verify_file as verify_file
from colossalai.checkpoint_io.storage._manifest import verify_files as verify_files
from colossalai.checkpoint_io.storage._manifest import write_manifest as write_manifest
from colossalai.checkpoint_io.storage._untrusted import OF_DAMAGE as OF_DAMAGE
from colossalai.checkpoint_io.storage._untrusted import Count as Count
from colossalai.checkpoint_io.storage._untrusted import Form as Form
from colossalai.checkpoint_io.storage._untrusted import Json as Json
from colossalai.checkpoint_io.storage._untrusted import damage_named as damage_named
from colossalai.checkpoint_io.storage._untrusted import json_checksum as json_checksum
from colossalai.checkpoint_io.storage._untrusted import listed as listed
from colossalai.checkpoint_io.storage._untrusted import of_kind as of_kind
from colossalai.checkpoint_io.storage._untrusted import read_checked_json as read_checked_json
from colossalai.checkpoint_io.storage._untrusted import read_json as read_json
from colossalai.checkpoint_io.storage._untrusted import refuse_links_out as refuse_links_out
from colossalai.checkpoint_io.storage._untrusted import refuse_other_form as refuse_other_form
from colossalai.checkpoint_io.storage._untrusted import refuse_special as refuse_special
from colossalai.checkpoint_io.storage._untrusted import refuse_strays as refuse_strays
